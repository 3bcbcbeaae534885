"""Decides which method proposes draft tokens for speculative decoding, and how many."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from ops.backends import ATTENTION
from ops.machine import Gpu
from runtime.config.model_facts import ModelFacts
from runtime.config.plan import DraftPlan, KernelPlan, ModelPlan, Plan
from runtime.config.resolve.plan_builder import Decision, PlanBuilder
from runtime.errors import ConfigurationError

MAX_DRAFTS = 8  # maximum number of draft tokens of prompt lookup per sequence
MODEL_DRAFTS = 4  # maximum number of draft tokens of a draft model per sequence
STEP_DRAFTS = 256  # maximum draft tokens per step; more would delay the step's rows without draft tokens
# Maximum draft tokens of a draft model per step on a CPU. Above this number, each further token makes a step longer.
MODEL_STEP_DRAFTS = 16
DEMO_HEAD = "draft_head"  # folder of the draft head in the demo model's folder
HEADS = ("EAGLE", "EAGLE3", "NEXTN")  # algorithms with layers that read the model's hidden states
BY_MODEL = ("STANDALONE", *HEADS)
ALGORITHMS = ("NGRAM", *BY_MODEL)
# Option -> the algorithms that read it. Of the options that are not listed, NGRAM alone reads those with "ngram" in the
# name, and all algorithms read the others.
_READERS = {
    "speculative_token_map": ("EAGLE", "NEXTN"),
    **dict.fromkeys([f"speculative_{name}" for name in ("num_steps", "eagle_topk")], BY_MODEL),
    **dict.fromkeys([f"speculative_draft_model_{name}" for name in ("path", "revision")], BY_MODEL),
}
_NUMBERS = ("max_drafts", "max_lookup_drafts", "max_model_drafts")


def draft_plan(builder: PlanBuilder, demo_path: str | None) -> DraftPlan:
    """Plan the draft model. Its path is the user's or, for the demo model at `demo_path`, that of the demo's head."""
    algorithm = model_method(builder)
    path = builder.follow("speculative_draft_model_path")
    is_demo = demo_path is not None and builder.args.model.model_path in (None, demo_path)
    if algorithm == "EAGLE3" and path.value is None and is_demo:
        path = Decision(str(Path(demo_path or "", DEMO_HEAD)), "the demo model's draft head")
    if algorithm in ("STANDALONE", "EAGLE", "EAGLE3") and path.value is None:
        needed = "a small model with the same vocabulary" if algorithm == "STANDALONE" else "a head trained for it"
        builder.refuse(
            "speculative_algorithm",
            f"--speculative-algorithm {algorithm} needs --speculative-draft-model-path, {needed}.",
        )
    _check_corpus(builder)
    return builder.build(
        DraftPlan,
        algorithm=Decision(algorithm, "by --speculative-algorithm"),
        path=path,
        revision=builder.follow("speculative_draft_model_revision"),
        token_map=builder.follow("speculative_token_map"),
    )


def draft_decisions(
    builder: PlanBuilder, gpu: Gpu | None, facts: ModelFacts, kernels: KernelPlan, *, overlap: bool
) -> dict[str, Decision]:
    """Return the decisions about draft tokens for the scheduler's section of the plan."""
    by_model = model_method(builder) is not None
    _check_used(builder)
    numbers = _max_drafts(builder, facts)
    step_drafts = Decision(STEP_DRAFTS, "rows without drafts must not wait long for rows with drafts")
    if by_model and gpu is None:
        step_drafts = Decision(MODEL_STEP_DRAFTS, "on a CPU, larger steps with more drafts do not pay")
    return {
        **numbers,
        "max_corpus_drafts": _corpus_drafts(builder, numbers["max_lookup_drafts"]),
        "max_step_drafts": step_drafts,
        "min_draft_gain": _min_gain(builder),
        "overlap_drafts": _overlap_drafts(builder, gpu, kernels, overlap=overlap),
        "overlap_draws": Decision(gpu is None, "positions are known" if gpu is None else "positions are unknown"),
        "draft_constraints": Decision(
            gpu is None, "the host knows the drafts' ids" if gpu is None else "only the GPU knows the drafts' ids"
        ),
        "draft_windows": _draft_windows(builder),
        "draft_breadths": _breadths(builder),
        "drafts_by_frequency": Decision(
            builder.args.speculative.speculative_ngram_match_type == "PROB", "by --speculative-ngram-match-type"
        ),
        "draft_capacity": builder.follow("speculative_ngram_capacity"),
        **_tree(builder, facts),
    }


def drafts_by_prefill(builder: PlanBuilder, gpu: Gpu | None, decode: str, prefill: str) -> bool:
    """Return whether the prefill attention backend computes rows with draft tokens (--speculative-attention-mode)."""
    is_asked = builder.args.speculative.speculative_attention_mode == "prefill"
    if is_asked and gpu is not None and decode != prefill and not builder.args.graphs.disable_cuda_graph:
        builder.refuse(
            "speculative_attention_mode",
            "--speculative-attention-mode prefill: CUDA graphs compute rows with drafts as rows of one token, with the "
            f"backend of decode ({decode}), not with {prefill}; leave it out, or set --disable-cuda-graph.",
        )
    return is_asked


def draft_model_plan(plan: Plan) -> ModelPlan:
    """Return the plan of the draft model's weights, with the device and the precision of the served model."""
    model = plan.model
    return ModelPlan(
        path=plan.draft.path or "",
        load_format="dummy" if model.load_format == "dummy" else "auto",
        dtype=model.dtype,
        device=model.device,
        context_length=model.context_length,
        random_seed=model.random_seed,
        mmap=model.mmap,
        num_load_threads=model.num_load_threads,
        any_dtype=plan.draft.algorithm in HEADS,  # some heads have tensors in other dtypes
    )


def check_draft_model(plan: Plan, facts: ModelFacts, draft: ModelFacts) -> None:
    """Raise `ConfigurationError` if the model with the facts `draft` cannot propose tokens for the served model."""
    why = None
    if draft.is_encoder:
        why = f"{draft.architecture} generates no tokens"
    elif draft.vocab_size != facts.vocab_size:
        why = f"its vocabulary has {draft.vocab_size} tokens, and that of the served model {facts.vocab_size}"
    elif plan.draft.algorithm in HEADS and draft.hidden_size != facts.hidden_size:
        why = f"its hidden_size is {draft.hidden_size}, and that of the served model {facts.hidden_size}"
    elif plan.draft.algorithm == "STANDALONE" and draft.context_length < plan.model.context_length:
        why = (
            f"its context of {draft.context_length} tokens is shorter than {plan.model.context_length}; set "
            f"--context-length {draft.context_length}"
        )
    if why is not None:
        raise ConfigurationError(f"--speculative-draft-model-path {plan.draft.path}: {why}.")


def methods(builder: PlanBuilder) -> tuple[str, ...]:
    """Return the draft methods in the order of the option; () without speculation."""
    algorithm = builder.args.speculative.speculative_algorithm
    return tuple(algorithm.split(",")) if algorithm is not None else ()


def model_method(builder: PlanBuilder) -> str | None:
    """Return the method that uses a draft model or head, or None."""
    return next((method for method in methods(builder) if method in BY_MODEL), None)


def _check_used(builder: PlanBuilder) -> None:
    """Refuse options that no selected method reads.

    The attention mode is accepted without a method, because command lines for SGLang may contain it.
    """
    for option in (field.name for field in fields(builder.args.speculative)):
        readers = _READERS.get(option, ("NGRAM",) if "ngram" in option else ALGORITHMS)
        is_read = option in ("speculative_algorithm", "speculative_config", "speculative_attention_mode")
        if not is_read and builder.args.changed(option) and not set(methods(builder)) & set(readers):
            flag = "--" + option.replace("_", "-")
            builder.refuse(option, f"{flag} needs --speculative-algorithm {' or '.join(readers)}.")


def _max_drafts(builder: PlanBuilder, facts: ModelFacts) -> dict[str, Decision]:
    algorithm, model = builder.args.speculative.speculative_algorithm, model_method(builder)
    if algorithm is None:
        return dict.fromkeys(_NUMBERS, Decision(0, "no --speculative-algorithm is set"))
    why = _no_drafts_because(builder, facts, model)
    if why is not None:
        builder.refuse("speculative_algorithm", f"--speculative-algorithm {algorithm}: {why}.")
        return dict.fromkeys(_NUMBERS, Decision(0, why))
    decisions = dict.fromkeys(_NUMBERS, Decision(0, "by --speculative-algorithm"))
    if model is not None:
        decisions["max_model_drafts"] = _model_drafts(builder, model, chained=algorithm != model)
    if "NGRAM" in methods(builder):
        most, why = MAX_DRAFTS, "the default for prompt lookup"
        if facts.recurrent:
            most, why = MODEL_DRAFTS, "recurrent layers keep a state for each draft token of a sequence"
        decisions["max_lookup_drafts"] = lookup = builder.follow_or("speculative_num_draft_tokens", most, why)
        longest = builder.args.speculative.speculative_ngram_branch_length
        if longest is not None and longest < lookup.value:
            decisions["max_lookup_drafts"] = Decision(longest, "by --speculative-ngram-branch-length")
    return {**decisions, "max_drafts": max(decisions.values(), key=lambda each: each.value)}


def _no_drafts_because(builder: PlanBuilder, facts: ModelFacts, model: str | None) -> str | None:
    """Return the reason why there cannot be draft tokens, or None if there can be."""
    if facts.is_encoder:
        return f"{facts.architecture} generates no tokens; leave it out"
    if model is None:
        return None
    if model in HEADS and builder.args.graphs.enable_torch_compile:
        return (
            "draft heads read hidden states, which compiled steps do not return; leave out this option or "
            "--enable-torch-compile"
        )
    return None


def _model_drafts(builder: PlanBuilder, method: str, *, chained: bool) -> Decision[int]:
    """Decide how many tokens a draft model or head proposes.

    As in SGLang, --speculative-num-draft-tokens also counts the token before the draft tokens. If the model is
    `chained` with prompt lookup, this option applies to prompt lookup only.
    """
    args, why = builder.args.speculative, None
    steps, tokens = args.speculative_num_steps, None if chained else args.speculative_num_draft_tokens
    is_chain = args.speculative_eagle_topk == 1
    if is_chain and tokens is not None and steps is not None and tokens != steps + 1:
        why = (
            f"a chain of --speculative-num-steps {steps} has {steps + 1} tokens with the one that it follows; leave it "
            "out"
        )
    elif tokens == 1:
        why = "the token that drafts follow counts too; set at least 2"
    if why is not None:
        builder.refuse("speculative_num_draft_tokens", f"--speculative-num-draft-tokens {tokens}: {why}.")
    if tokens is not None and (steps is None if is_chain else (steps or MODEL_DRAFTS) >= tokens):
        return Decision(tokens - 1, "by --speculative-num-draft-tokens, without the token that drafts follow")
    if steps is not None:
        return Decision(steps, "by --speculative-num-steps")
    return Decision(MODEL_DRAFTS, f"the default for {method}")


def _tree(builder: PlanBuilder, facts: ModelFacts) -> dict[str, Decision]:
    """Decide the number of alternatives per draft token, and the maximum numbers of draft tokens with alternatives."""
    args = builder.args.speculative
    topk = args.speculative_eagle_topk
    if topk > 1 and model_method(builder) is not None:
        _check_tree(builder, facts, "speculative_eagle_topk", topk)
    if args.speculative_ngram_max_bfs_breadth > 1 and "NGRAM" in methods(builder):
        _check_tree(builder, facts, "speculative_ngram_max_bfs_breadth", args.speculative_ngram_max_bfs_breadth)
    steps = args.speculative_num_steps or MODEL_DRAFTS
    tokens = args.speculative_num_draft_tokens
    most = steps * topk if tokens is None or topk == 1 else tokens - 1
    reason = "drafts of all steps" if tokens is None else "by the number of draft tokens"
    return {
        "draft_topk": builder.follow("speculative_eagle_topk"),
        "max_tree_drafts": Decision(most, reason),
        "max_lookup_ids": Decision(tokens or MAX_DRAFTS, reason),
    }


def _check_tree(builder: PlanBuilder, facts: ModelFacts, option: str, value: int) -> None:
    if facts.recurrent:
        why = "recurrent layers take one chain of drafts, because a state cannot follow two branches"
        builder.refuse(option, f"--{option.replace('_', '-')} {value}: {why}; set it to 1.")


def _overlap_drafts(builder: PlanBuilder, gpu: Gpu | None, kernels: KernelPlan, *, overlap: bool) -> Decision[bool]:
    attention = kernels.decode_attention_backend
    if builder.args.speculative.speculative_algorithm is None:
        return Decision(False, "no --speculative-algorithm is set")
    if not overlap:
        return Decision(False, "steps do not overlap")
    if builder.args.parallel.pp_size > 1:
        return Decision(False, "in a pipeline, a sequence is in one step at a time")
    if gpu is None:
        return Decision(True, "on a CPU, row positions are known when a step begins")
    if ATTENTION[attention].exact_starts:
        return Decision(False, f"{attention} needs the exact lengths of rows on the host")
    if kernels.dump_folder is not None:
        return Decision(False, "dumped tensors need exact positions")
    return Decision(True, f"{attention} reads the lengths of rows on the device")


def _min_gain(builder: PlanBuilder) -> Decision[float | None]:
    args = builder.args.speculative
    fields, flag = args.speculative_adaptive, "--speculative-adaptive"
    unknown = fields.keys() - {"enabled", "min_gain"}
    enabled, gain = fields.get("enabled", True), fields.get("min_gain", 1.0)
    if unknown:
        builder.refuse("speculative_adaptive", f"{flag}: {', '.join(sorted(unknown))} is not enabled or min_gain.")
    elif type(enabled) is not bool:
        builder.refuse("speculative_adaptive", f"{flag}: enabled must be true or false, not {enabled!r}.")
    elif isinstance(gain, bool) or not isinstance(gain, int | float) or not 0 < gain <= 100:
        builder.refuse("speculative_adaptive", f"{flag}: min_gain must be a number from above 0 to 100, not {gain!r}.")
    elif args.speculative_algorithm is None:
        return Decision(None, "no --speculative-algorithm is set")
    elif enabled:
        return Decision(float(gain), "drafts must make steps faster")
    return Decision(None, "by --speculative-adaptive")


def _draft_windows(builder: PlanBuilder) -> Decision[tuple[int, int]]:
    args = builder.args.speculative
    low, high = args.speculative_ngram_min_match_window_size, args.speculative_ngram_max_match_window_size
    if args.speculative_ngram_max_trie_depth is not None:
        high = min(high, args.speculative_ngram_max_trie_depth - 1)
    _check_range(builder, "speculative_ngram_min_match_window_size", low, high, "the largest window")
    return Decision((low, high), "the shortest and the longest n-gram that is looked up")


def _breadths(builder: PlanBuilder) -> Decision[tuple[int, int]]:
    args = builder.args.speculative
    low, high = args.speculative_ngram_min_bfs_breadth, args.speculative_ngram_max_bfs_breadth
    _check_range(builder, "speculative_ngram_min_bfs_breadth", low, high, "--speculative-ngram-max-bfs-breadth")
    return Decision((low, high), "continuations after the longest and after the shortest n-grams")


def _corpus_drafts(builder: PlanBuilder, lookup: Decision[int]) -> Decision[int]:
    """Decide how many draft tokens may come from corpora, if `lookup` draft tokens may come from prompt lookup."""
    budget = builder.args.speculative.speculative_ngram_external_sam_budget
    if budget is None or budget >= lookup.value:
        return lookup
    return Decision(budget, "by --speculative-ngram-external-sam-budget")


def _check_corpus(builder: PlanBuilder) -> None:
    args, option = builder.args.speculative, "speculative_ngram_external_corpus_path"
    path, why = args.speculative_ngram_external_corpus_path, None
    if path is None:
        return
    if builder.args.parallel.node_rank == 0 and not Path(path).is_file():  # only the first machine reads it
        why = "it is not a file of this machine"
    elif args.speculative_ngram_external_sam_budget == 0:
        why = "--speculative-ngram-external-sam-budget 0 leaves no drafts for it; set at least 1"
    elif builder.args.text.skip_tokenizer_init:
        why = "without a tokenizer (--skip-tokenizer-init), texts cannot be read; add token ids by /add_external_corpus"
    if why is not None:
        builder.refuse(option, f"--{option.replace('_', '-')} {path}: {why}.")


def _check_range(builder: PlanBuilder, option: str, low: int, high: int, limit: str) -> None:
    if low > high:
        builder.refuse(option, f"--{option.replace('_', '-')} {low} exceeds {limit} of {high}.")
