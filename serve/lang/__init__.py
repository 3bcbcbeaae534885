"""SGLang's front-end language on an engine in this process: programs that generate, choose, fork and chat.

    from penstock import lang as sgl

    @sgl.function
    def answer(s, question):
        s += sgl.user(question)
        s += sgl.assistant(sgl.gen("answer", max_tokens=64))

    sgl.set_default_backend(sgl.Engine())
    print(answer.run(question="What is 2 + 3?")["answer"])

Programs written for SGLang run with this import in place of `import sglang as sgl`. Each program has one `Generation`.
Texts are appended to the generation, `gen` continues it, `select` compares continuations of it, and `fork` copies it.
Therefore common prefixes are computed once. Messages are rendered with the model's own chat template. An `async def`
program runs on an `Engine` with `arun`.
"""

from serve.lang.expressions import (
    assistant,
    assistant_begin,
    assistant_end,
    gen,
    gen_int,
    gen_string,
    select,
    system,
    system_begin,
    system_end,
    user,
    user_begin,
    user_end,
)
from serve.lang.program import Engine, Program, Runtime, default_backend, function, set_default_backend
from serve.lang.server_args import ServerArgs
from serve.lang.state import ProgramState, ProgramStateGroup

__all__ = [
    "Engine",
    "Program",
    "ProgramState",
    "ProgramStateGroup",
    "Runtime",
    "ServerArgs",
    "assistant",
    "assistant_begin",
    "assistant_end",
    "default_backend",
    "function",
    "gen",
    "gen_int",
    "gen_string",
    "select",
    "set_default_backend",
    "system",
    "system_begin",
    "system_end",
    "user",
    "user_begin",
    "user_end",
]
