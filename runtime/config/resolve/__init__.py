"""Makes the plan from Args, Machine and ModelFacts. Each value of the plan has a reason.

Each section of the plan is made by one function. These functions have no side effects, except that a random seed is
drawn if none is set. All refusals are raised together, before weights are loaded.
"""

from __future__ import annotations

from dataclasses import replace

from ops.machine import Machine
from runtime.config.args import Args, not_built
from runtime.config.model_facts import ModelFacts
from runtime.config.plan import Plan
from runtime.config.resolve.cache import cache_plan
from runtime.config.resolve.drafts import draft_plan
from runtime.config.resolve.experts import expert_plan
from runtime.config.resolve.graphs import graph_plan
from runtime.config.resolve.kernels import compiled_in_background, kernel_plan
from runtime.config.resolve.lora import lora_plan
from runtime.config.resolve.media import media_plan
from runtime.config.resolve.model import chosen_gpu, model_plan
from runtime.config.resolve.observe import observe_plan
from runtime.config.resolve.parallel import parallel_plan
from runtime.config.resolve.plan_builder import PlanBuilder
from runtime.config.resolve.schedule import schedule_plan
from runtime.config.resolve.serving import serve_plan, text_plan
from runtime.errors import ConfigurationError

__all__ = ["ANY_MODEL", "check", "decide", "resolve"]

# Placeholder facts for a model that has not been read. They cause no refusal.
ANY_MODEL = ModelFacts(
    architecture="",
    path="",
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=1,
    hidden_size=1,
    vocab_size=1,
    context_length=2**62,
    dtype="float32",
)


def resolve(args: Args, machine: Machine, facts: ModelFacts, *, demo_path: str | None = None) -> Plan:
    """Return the plan for these arguments, machine and model.

    `demo_path` is the folder of the demo model, or None. Raises `ConfigurationError` with all refusals.
    """
    plan, builder = decide(args, machine, facts, demo_path=demo_path)
    if builder.refusals:
        raise ConfigurationError(*builder.refusals.values())
    return plan


def check(args: Args, machine: Machine, *, demo_path: str | None = None) -> str:
    """Check the options that do not depend on the model, and return the model's path or Hub name.

    Raises `ConfigurationError` with all refusals.
    """
    _, builder = decide(args, machine, ANY_MODEL, demo_path=demo_path)
    if builder.refusals:
        raise ConfigurationError(*builder.refusals.values())
    return _where(builder, demo_path)


def decide(
    args: Args, machine: Machine, facts: ModelFacts, *, demo_path: str | None = None
) -> tuple[Plan, PlanBuilder]:
    """Return the plan, and the builder with all refusals. Unlike `resolve`, do not raise them."""
    builder = PlanBuilder(args=args, refusals=not_built(args))
    where = _where(builder, demo_path)
    model = model_plan(builder, machine, facts)
    gpu = chosen_gpu(model.device, machine)
    cache = cache_plan(builder, machine, gpu, model.dtype, facts)
    kernels = kernel_plan(builder, machine, gpu, model.dtype, facts, cache)
    schedule = schedule_plan(builder, gpu, cache, facts, kernels)
    parallel = parallel_plan(builder, machine, facts, model.device, model.dtype)
    plan = Plan(
        model=model,
        cache=cache,
        scheduler=schedule,
        kernels=kernels,
        graphs=graph_plan(
            builder,
            machine,
            gpu,
            kernels.decode_attention_backend,
            schedule.max_sampled,
            facts,
            step_tokens=(schedule.chunk_tokens or max(schedule.max_prefill_tokens, model.context_length))
            + schedule.max_running * schedule.mixed,
            is_embedding=model.is_embedding,
            by_transformers=model.by_transformers,
        ),
        parallel=parallel,
        observe=observe_plan(builder),
        tokenizer=text_plan(builder, machine, facts.path),
        serve=serve_plan(builder, where, demo_path),
        lora=lora_plan(builder, kernels),
        draft=draft_plan(builder, demo_path),
        media=media_plan(builder, machine, facts, model),
        experts=expert_plan(builder, facts, model),
    )
    return replace(plan, kernels=compiled_in_background(builder, machine, facts, plan)), builder


def _where(builder: PlanBuilder, demo_path: str | None) -> str:
    path = builder.args.model.model_path or demo_path
    if path is None:
        builder.refuse("model_path", "No model is given, and the demo model is not installed; set --model-path FOLDER.")
    return path or ""
