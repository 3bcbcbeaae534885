"""Programs in SGLang's front-end language: its published examples' forms, run on the demo model."""

from __future__ import annotations

import argparse
import dataclasses
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from penstock import Engine, InvalidRequest
from penstock import lang as sgl


@pytest.fixture(scope="module", autouse=True)
def backend() -> Iterator[sgl.Engine]:
    with sgl.Engine(context_length=1024) as engine:
        sgl.set_default_backend(engine)
        yield engine


# --- programs of SGLang's documentation and examples, in our own words ---


@sgl.function
def few_shot(s: Any, question: str) -> None:
    s += "Q: What is the capital of France?\nA: Paris\n"
    s += "Q: " + question + "\n"
    s += "A:" + sgl.gen("answer", stop="\n", temperature=0, max_tokens=12)


@sgl.function
def multi_turn(s: Any, question_1: str, question_2: str) -> None:
    s += sgl.system("You are a helpful assistant.")
    s += sgl.user(question_1)
    s += sgl.assistant(sgl.gen("answer_1", max_tokens=16))
    s += sgl.user(question_2)
    s += sgl.assistant(sgl.gen("answer_2", max_tokens=16))


@sgl.function
def tool_use(s: Any, question: str) -> None:
    s += "To answer this question: " + question + ". "
    s += "I need to use a " + sgl.gen("tool", choices=["calculator", "search engine"]) + ". "
    if s["tool"] == "calculator":
        s += "The math expression is" + sgl.gen("expression", max_tokens=6)
    else:
        s += "The key word to search is" + sgl.gen("word", max_tokens=6)


@sgl.function
def tip_suggestion(s: Any) -> None:
    s += "Here are two tips for staying healthy: 1. Balanced Diet. 2. Regular Exercise.\n\n"
    forks = s.fork(2)
    for i, f in enumerate(forks):
        f += f"Now, expand tip {i + 1} into a paragraph:\n"
        f += sgl.gen("detailed_tip", max_tokens=8, temperature=0)
    s += "Tip 1:" + forks[0]["detailed_tip"] + "\n"
    s += "Tip 2:" + forks[1]["detailed_tip"] + "\n"
    s += "In summary" + sgl.gen("summary", max_tokens=6)


@sgl.function
def regex_gen(s: Any) -> None:
    s += "Q: What is the IP address?\nA: "
    s += sgl.gen("answer", temperature=0, regex=r"((25[0-5]|2[0-4]\d|[01]?\d\d?).){3}(25[0-5]|2[0-4]\d|[01]?\d\d?)")


def test_text_continues_and_stops(backend: sgl.Engine) -> None:
    state = few_shot.run(question="What is the capital of Italy?")
    prompt = state.text()[: -len(state["answer"])] if state["answer"] else state.text()
    assert prompt.endswith("A:")
    alone = backend.generate(prompt, {"stop": "\n", "temperature": 0, "max_new_tokens": 12})
    assert state["answer"] == alone.text
    assert state.get_meta_info("answer")["completion_tokens"] <= 12


def test_messages_are_those_of_the_chat_api(backend: sgl.Engine) -> None:
    state = multi_turn.run(question_1="What is 2 + 3?", question_2="And 4 + 5?", temperature=0)
    roles = [message["role"] for message in state.messages()]
    assert roles == ["system", "user", "assistant", "user", "assistant"]
    first = backend.chat(state.messages()[:2], temperature=0, max_tokens=16)
    assert state["answer_1"].strip() == first.choices[0].message.content.strip()
    second = backend.chat(state.messages()[:4], temperature=0, max_tokens=16)
    assert state["answer_2"].strip() == second.choices[0].message.content.strip()


def test_a_program_branches_on_what_was_chosen() -> None:
    state = tool_use.run(question="What is 2 + 3", temperature=0)
    assert state["tool"] in ("calculator", "search engine")
    assert ("expression" in state) != ("word" in state)
    assert set(state.get_meta_info("tool")["scores"]) == {"calculator", "search engine"}


def test_forks_run_from_one_prefix(backend: sgl.Engine) -> None:
    state = tip_suggestion.run(temperature=0)
    prefix = "Here are two tips for staying healthy: 1. Balanced Diet. 2. Regular Exercise.\n\n"
    for number in (1, 2):
        prompt = prefix + f"Now, expand tip {number} into a paragraph:\n"
        alone = backend.generate(prompt, temperature=0, max_new_tokens=8)
        assert f"Tip {number}:{alone.text}\n" in state.text()
    assert state.text().endswith("In summary" + state["summary"])


def test_regular_expressions_and_types() -> None:
    assert regex_gen.run()["answer"].count(".") >= 0

    @sgl.function
    def numbers(s: Any) -> None:
        s += "The number " + sgl.gen_int("number", max_tokens=6) + " and " + sgl.gen("truth", dtype=bool, max_tokens=8)

    state = numbers.run(temperature=0)
    assert int(state["number"]) is not None
    assert state["truth"] in ("True", "False")


def test_roles_as_blocks() -> None:
    @sgl.function
    def chat(s: Any) -> None:
        with s.user():
            s += "Say hello"
            s += " twice."
        with s.assistant():
            s += "Hello" + sgl.gen("more", max_tokens=4)

    state = chat.run(temperature=0)
    assert state.messages()[0] == {"role": "user", "content": "Say hello twice."}
    assert state.messages()[1]["content"] == "Hello" + state["more"]


def test_stream_yields_the_text_as_it_grows() -> None:
    whole = few_shot.run(question="Who?")
    state = few_shot.run(question="Who?", stream=True)
    assert "".join(state.text_iter()) == whole.text()
    state = few_shot.run(question="Who?", stream=True)
    assert "".join(state.text_iter("answer")).startswith(whole["answer"])


async def test_stream_beside_a_running_loop() -> None:
    state = few_shot.run(question="Who?", stream=True)
    assert "".join([text async for text in state.text_async_iter()]) == few_shot.run(question="Who?").text()


def test_batch_runs_side_by_side_and_in_order(backend: sgl.Engine) -> None:
    questions = [f"What is {number} + 1?" for number in range(40)]
    states = few_shot.run_batch([{"question": question} for question in questions], progress_bar=True)
    prompts = [state.text()[: len(state.text()) - len(state["answer"])] for state in states]
    assert all(question in prompt for question, prompt in zip(questions, prompts, strict=True))
    answers = backend.generate(prompts, {"stop": "\n", "temperature": 0, "max_new_tokens": 12})
    assert [state["answer"] for state in states] == [answer.text for answer in answers]


def test_a_failing_program_hurts_no_other() -> None:
    states = few_shot.run_batch([{"question": "Who?"}, {"question": 5}])
    assert isinstance(states[1].error(), TypeError)
    assert states[0]["answer"] is not None
    with pytest.raises(TypeError):
        few_shot.run(question=5)

    @sgl.function
    def too_long(s: Any) -> None:
        s += "word " * 5000 + sgl.gen("x")

    with pytest.raises(InvalidRequest, match="context"):
        too_long.run()


def test_an_interrupted_batch_ends_its_programs(backend: sgl.Engine) -> None:
    @sgl.function
    def endless(s: Any) -> None:
        s += "Once" + sgl.gen("x", max_tokens=900, ignore_eos=True)

    def interrupt() -> None:
        while not backend.status().num_running:
            time.sleep(0.01)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        endless.run_batch([{}] * 200)
    while backend.status().num_requests:
        time.sleep(0.01)
    assert few_shot.run(question="Who?")["answer"] is not None


def test_an_interrupted_batch_ends_forks_and_takes_no_further_parts(backend: sgl.Engine) -> None:
    begun = threading.Event()
    heard: list[BaseException | None] = []

    @sgl.function
    def forking(s: Any) -> None:
        s += "Once"
        [fork] = s.fork(1)
        fork += sgl.gen("x", max_tokens=900, ignore_eos=True)
        begun.set()
        fork.sync()
        heard.append(fork.error())

    @sgl.function
    def busy(s: Any) -> None:
        s += "Once"
        forking(s)
        until = time.monotonic() + 10
        while s.error() is None and time.monotonic() < until:  # a program that computes something itself
            time.sleep(0.001)
        s += sgl.gen("x", max_tokens=900, ignore_eos=True)
        heard.append(None if "x" in s else s.error())

    def interrupt() -> None:
        begun.wait()
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        busy.run_batch([{}])
    assert len(heard) == 2
    assert all(isinstance(error, InvalidRequest) for error in heard)
    while backend.status().num_requests:
        time.sleep(0.01)
    with pytest.raises(TypeError):
        few_shot.run(question=5, stream=True).text()


def test_join_gathers_variables() -> None:
    @sgl.function
    def votes(s: Any) -> None:
        s += "A number: "
        with s.fork(3) as forks:
            for f in forks:
                f += sgl.gen("vote", regex="[0-9]", max_tokens=2, temperature=1)

    assert len(votes.run(seed=1)["vote"]) == 3


def test_several_outputs_of_one_gen() -> None:
    @sgl.function
    def several(s: Any) -> None:
        s += "Once" + sgl.gen("story", n=3, max_tokens=6, temperature=1) + " end"

    state = several.run(seed=4)
    assert len(state["story"]) == 3
    assert state.text() == "Once" + state["story"][0] + " end"


def test_programs_call_programs_and_bind() -> None:
    @sgl.function
    def outer(s: Any, name: str) -> None:
        few_shot(s, question=f"Who is {name}?")
        s += "\nThe end."

    assert outer.bind(name="Ada").run().text().endswith("The end.")


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (lambda: sgl.gen("x", max_token=3), "max_token"),
        (lambda: sgl.gen("x", dtype=list), "dtype"),
        (lambda: sgl.select("x", choices=[]), "choices"),
    ],
)
def test_wrong_parts_are_refused_where_they_are_written(part: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        part()


def test_a_backend_that_cannot_run_programs_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="penstock"):
        sgl.set_default_backend(object())


def test_unknown_variable_names_the_known_ones() -> None:
    with pytest.raises(KeyError, match="answer"):
        few_shot.run(question="Who?")["anser"]


async def test_async_programs_run_on_the_loop() -> None:
    @sgl.function
    async def story(s: Any, animal: str) -> None:
        s += f"The {animal}" + sgl.gen("first", max_tokens=5)
        first = await s.get("first")
        s += f" ({first.strip()})" + sgl.gen("second", max_tokens=3)

    async with Engine() as engine:
        state = await story.arun(engine, animal="cat", temperature=0)
        assert state["second"] is not None
        assert (await engine.generate("The cat", temperature=0, max_new_tokens=5)).text == state["first"]


def test_a_batch_is_not_limited_by_its_threads(backend: sgl.Engine) -> None:
    backend.pause_generation("in_place")
    batch = threading.Thread(target=few_shot.run_batch, args=([{"question": "Who?"}] * 150,))
    batch.start()
    while backend.status().num_requests < 150:
        time.sleep(0.01)
    backend.continue_generation()
    batch.join()


def test_meta_info_has_the_logprobs_of_choices_and_of_the_next_token() -> None:
    @sgl.function
    def both(s: Any) -> None:
        s += "It is " + sgl.gen("next", max_tokens=0, return_logprob=True, top_logprobs_num=3)
        s += sgl.gen("tool", choices=["red", "quite blue"])

    state = both.run()
    assert state["next"] == ""
    assert len(state.get_meta_info("next")["output_top_logprobs"][0]) == 3
    meta = state.get_meta_info("tool")
    for tokens, score in zip(meta["input_token_logprobs"], meta["normalized_prompt_logprobs"], strict=True):
        assert sum(logprob for logprob, _, _ in tokens) / len(tokens) == pytest.approx(score)


def test_options_from_a_command_line() -> None:
    parser = argparse.ArgumentParser()
    sgl.ServerArgs.add_cli_args(parser)
    server_args = sgl.ServerArgs.from_cli_args(parser.parse_args(["--model-path", "m", "--tp-size", "2"]))
    assert dataclasses.asdict(server_args) == {"model_path": "m", "tp_size": 2}  # pyright: ignore[reportArgumentType]
    assert server_args.dtype == "auto"
