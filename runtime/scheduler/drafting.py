"""Selects the rows of the next step that get draft tokens."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from runtime.batch import Batch
from runtime.config.plan import SchedulerPlan
from runtime.kv_cache.prefix_cache import PrefixCache
from runtime.request import DraftCounts
from runtime.scheduler.request_tables import Running
from runtime.scheduler.sampling import forbids_ends, is_penalised
from runtime.sequence import Branch, Sequence
from runtime.speculative.chain import ChainDrafter
from runtime.speculative.corpus import LENGTHS, CorpusLookup
from runtime.speculative.gain import DraftGain
from runtime.speculative.match_odds import MatchOdds
from runtime.speculative.model_drafts import ModelDrafter
from runtime.speculative.ngram import STEP_TOKENS, CatchUp, LookupSettings, NgramDrafter


class Drafting:
    """Collects draft tokens from the drafters of running sequences, and allocates pages for them.

    While a row with draft tokens is in flight, only the device knows how many are accepted, and so where the sequence's
    next row begins. Meanwhile the sequence may be in at most one further step (`may_follow`). The sequence's row in
    this step has draft tokens only if a draft model proposes them on the device. Other sequences are not affected.

    A sequence with a constraint waits for the result of its draft tokens, because its next mask depends on them. It
    gets no draft tokens if its constraint cannot compute masks after draft tokens (a logits processor), or if a cache
    kind cannot rewind as many tokens as a late mask would require.
    """

    def __init__(self, plan: SchedulerPlan, cache: PrefixCache, running: Running) -> None:
        self.counts = DraftCounts()  # draft tokens of all sequences, since the start
        self.enabled = plan.max_drafts > 0
        self.by_model = plan.max_model_drafts > 0
        self._max_lookup, self._max_model = plan.max_lookup_drafts, plan.max_model_drafts
        self._settings = LookupSettings(
            *plan.draft_windows,
            *plan.draft_breadths,
            by_frequency=plan.drafts_by_frequency,
            max_ids=plan.max_lookup_ids,
            capacity=plan.draft_capacity,
            max_corpus_drafts=plan.max_corpus_drafts,
        )
        self._catch_up = CatchUp()
        self._topk, self._max_tree = plan.draft_topk, plan.max_tree_drafts
        self._branches = self._topk > 1 or self._settings.max_breadth > 1
        self._max_step, self._max_row = plan.max_step_drafts, plan.max_drafts
        self._follows = plan.overlap_drafts
        self._follows_draws = plan.overlap_draws
        self._drafts_constraints = plan.draft_constraints
        # If a mask is late, all tokens of its row are rewound.
        self._may_stall = all(kind.steps_back is None or kind.steps_back > plan.max_drafts for kind in cache.kinds)
        # Measures whether draft tokens make steps faster. None: they are always proposed.
        self._gain = DraftGain(plan.min_draft_gain) if plan.min_draft_gain is not None else None
        # If there is a draft model, it proposes ids when prompt lookup does not, so match lengths are not measured.
        measures = self._gain is not None and not self.by_model
        self._odds = MatchOdds(self._settings.max_window) if measures else None
        self.corpora = CorpusLookup(MatchOdds(LENGTHS[0]) if measures else None)
        self._num_accepted = 0  # draft tokens accepted in steps that `note_step` has not recorded yet
        self._drafted_before = False  # whether the step that was applied last had draft tokens
        self._cache = cache
        self._running = running

    def start(self, sequence: Sequence) -> None:
        """Assign a drafter to a new sequence, if its rows may have draft tokens."""
        if not self.enabled or sequence.request.wants_embedding or sequence.request.returns_parts:
            return
        if sequence.constraint is not None and not (self._may_stall and sequence.constraint.takes_drafts):
            return
        asked = sequence.sampling.speculative
        lookup, model = (most if asked is None else min(asked, most) for most in (self._max_lookup, self._max_model))
        if sequence.constraint is not None and not self._drafts_constraints:
            model = 0
        looking = None
        if lookup:
            looking = NgramDrafter(
                lookup, self._settings, self._catch_up, self._odds, self.corpora, sequence.num_prompt
            )
        asking = ModelDrafter(model, self._topk, self._max_tree) if model else None
        sequence.drafter = ChainDrafter(looking, asking) if looking and asking else looking or asking

    def propose(self, decodes: Collection[Sequence], num_drafted: int = 0) -> dict[Sequence, list[int]]:
        """Return the proposed tokens of the sequences in `decodes`, and allocate their pages.

        In each of these sequences only one token has no KV yet. `num_drafted` is the number of tokens that other rows
        of the step already propose.
        """
        proposed: dict[Sequence, list[int]] = {}
        if not decodes or (self._gain is not None and not self._gain.allows(len(self._running))):
            return proposed
        if self._odds is not None and self._gain is not None:
            self._odds.cost = self._gain.cost(len(self._running))
            if self.corpora.odds is not None:
                self.corpora.odds.cost = self._odds.cost
        self._catch_up.left = STEP_TOKENS
        left = self._max_step - num_drafted
        # With a draft model, an equal share for each sequence.
        share = left // max(len(decodes), 1) if self.by_model else left
        for sequence in decodes:
            if sequence.drafter is None or left <= 0:
                continue
            # The row yields up to one token more than it proposes.
            limit = min(left, share, self._max_row, sequence.max_tokens - sequence.num_tokens - 1)
            if limit <= 0:
                continue
            ids = sequence.drafter.propose(sequence.ids, sequence.num_pending, limit)
            known = sequence.num_computed + 1
            ids = ids[: self.extend(sequence, known + len(ids)) - known]
            if ids:
                proposed[sequence] = ids
                left -= len(ids)
        return proposed

    def reads(self, sequences: Iterable[Sequence], num_drafted: int) -> bool:
        """Return whether the draft model takes part in a step with these sequences and `num_drafted` draft tokens.

        While draft tokens do not pay off, the draft model takes no part, so that steps cost the same as without a draft
        model. Its cache then lacks tokens of these sequences, so they get no further draft tokens from it, and the next
        trial uses new sequences. The draft model takes no part in trials of plain steps either. Its cache then lacks
        the few tokens of these steps, so its next draft tokens are worse.
        """
        if self._gain is None or num_drafted:
            return True
        if self._gain.measures_plain(len(self._running)):
            return False
        models = [each for each in sequences if each.drafter is not None and each.drafter.by_model]
        if not self._gain.is_off(len(self._running)):
            return bool(models)
        for sequence in models:
            sequence.drafter = sequence.drafter.lookup if isinstance(sequence.drafter, ChainDrafter) else None
        return False

    def branch(self, proposed: Mapping[Sequence, list[int]]) -> None:
        """Add branches to sequences whose draft rows will be added next, and allocate the branches' pages.

        One free page is left for each running sequence. Sequences with a constraint or penalties get no branches,
        because both depend on the tokens before each position of a row.
        """
        left, size = self._max_step - sum(map(len, proposed.values())), self._cache.page_size
        for sequence, trunk in proposed.items() if self._branches else ():
            if sequence.drafter is None or sequence.constraint is not None or is_penalised(sequence):
                continue
            for depth, ids in sequence.drafter.alternatives(trunk):
                first = sequence.num_computed + depth  # position of the branch's first id
                num_pages = (first + len(ids) - 1) // size - first // size + 1
                left -= len(ids)
                if left < 0 or self._cache.num_available - len(self._running) < num_pages:
                    return
                sequence.branches.append(Branch(depth, ids, first // size, self._cache.allocate(num_pages)))

    def note(self, sequence: Sequence, num_proposed: int, num_accepted: int) -> None:
        """Record how many of a row's draft tokens were proposed and accepted."""
        self.counts = self.counts.plus(num_proposed, num_accepted)
        self._num_accepted += num_accepted
        sequence.draft_counts = (sequence.draft_counts or DraftCounts()).plus(num_proposed, num_accepted)
        if sequence.drafter is not None:
            sequence.drafter.note(num_proposed, num_accepted, len(sequence.ids))

    def note_step(self, batch: Batch, num_tokens: int, seconds: float) -> None:
        """Record an applied step, to measure whether draft tokens make steps faster. Steps with prompts are ignored.

        `seconds` includes the time for which the step's launch waited for the verification of draft tokens.
        """
        if self._gain is None:
            return
        drafts, accepted, self._num_accepted = batch.drafts, self._num_accepted, 0
        follows, self._drafted_before = self._drafted_before, drafts is not None
        if num_tokens and not batch.stats.num_prompt_tokens:
            rows = max(len(self._running), 1)  # 0 if the step ended the only sequence
            # A step in which the draft model takes part is slower, even if it proposes no tokens.
            paused = self.by_model and batch.read_by_drafter and self._gain.allows(rows)
            self._gain.note(
                rows,
                drafted=drafts is not None or paused,
                follows=follows,
                num_tokens=num_tokens,
                seconds=seconds,
                drafted_rows=0 if drafts is None else len(drafts.rows),
                accepted=accepted,
            )

    def may_follow(self, sequence: Sequence) -> bool:
        """Return whether a sequence with draft tokens in flight may have another row in the next step.

        The sequence must wait for the result in each of these cases:
        - The choice of a token depends on its output position (seeded draws, `min_new_tokens`), and the device cannot
          compute this choice.
        - The sequence has a constraint.
        - The draft tokens may end the output, or have branches.
        - An earlier token, or another row with draft tokens, is in flight.
        """
        return (
            self._follows
            and (self._follows_draws or sequence.sampling.greedy)
            and not forbids_ends(sequence)
            and sequence.constraint is None
            and not sequence.branches
            and sequence.num_pending == 1 + sequence.num_drafted
            and sequence.num_computed + 1 < sequence.max_tokens
        )

    def extend(self, sequence: Sequence, end: int) -> int:
        """Allocate pages for the first `end` tokens, or for fewer. Return how many of these tokens have pages.

        One free page is left for each running sequence, so draft tokens never cause a retraction.
        """
        size = self._cache.page_size
        capacity = len(sequence.pages) * size
        if end > capacity:
            # Every running sequence may need one more page for its next token.
            spare = self._cache.num_available - len(self._running)
            end = min(end, capacity + max(spare, 0) * size)
            self._running.extend(sequence, end)
        return end
