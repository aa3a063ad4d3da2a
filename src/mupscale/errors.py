"""The exceptions of this package, and the layout and style of their messages.

Turns several faults into one message. The codes of the faults decide which of four types the error has, so that a program can
catch what it means. Knows nothing about models, tensors or files. The style, in six lines:

- a code names the refusal for programs and tests: "noise.too_large"; it stays when the words change;
- a claim says in one sentence what cannot be done: lower case first, no period last, no "please";
- `where` is a name the reader can search for: a tensor, a module, a file, an option without its "=";
- `what` says what was found and what was expected: "length 5, expected 6";
- `remedy` says what to write or do: "pass 6"; a lone fault may stand in the claim, as "found, expected; remedy";
- values are shown as Python shows them ('adam', 0.1), code to write stands bare (lr=0.1); no backticks.

The page docs/refusals.md lists every code with its words. It is generated; change a message here in the source.

>>> try:
...     raise_faults("the plan does not fit", [Fault("plan.length", "w", "length 5, expected 6", "pass 6")])
... except MupscaleError as error:
...     print(error.codes)
('plan.length',)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

__all__ = ["DamagedFile", "NotExact", "Undecided", "WrongArgument"]


class Fault(NamedTuple):
    """One thing that is wrong: its code, where it is, what was found, and what to write instead.

    Attributes:
        code: The name of the refusal, which stays when its words change: "plan.length".
        where: A name to search for: a tensor, a module, a file, an option.
        what: What was found and what was expected.
        remedy: What to write or do; empty if nothing is known to help.

    >>> print(Fault("plan.length", "w", "length 5, expected 6", "pass 6"))
      w [plan.length]
        length 5, expected 6
        pass 6
    """

    code: str
    where: str
    what: str
    remedy: str = ""

    def __str__(self) -> str:
        lines = [f"  {self.where} [{self.code}]", f"    {self.what}"]
        if self.remedy:
            lines.append(f"    {self.remedy}")
        return "\n".join(lines)


class MupscaleError(Exception):
    """Raised once for everything that is wrong with a request; nothing was changed.

    An error has either faults, each with a code, or a claim that says everything and a code of its own. `error.codes` holds them.

    Args:
        claim: One sentence that says what cannot be done.
        faults: Everything that is wrong. Their codes decide which of the four types in `mu.errors` the error has.
        code: The code of the claim, for an error without faults.

    >>> print(MupscaleError("the plan does not fit", [Fault("plan.length", "w", "length 5, expected 6", "pass 6")]))
    the plan does not fit (1 fault)
    <BLANKLINE>
      w [plan.length]
        length 5, expected 6
        pass 6
    >>> print(MupscaleError("the file is empty", code="file.empty"))
    the file is empty [file.empty]
    """

    def __new__(cls, claim: str, faults: Sequence[Fault] = (), *, code: str = "") -> MupscaleError:
        kind = _kind([fault.code for fault in faults] or [code]) if cls is MupscaleError else cls
        return super().__new__(kind, claim, faults)

    def __init__(self, claim: str, faults: Sequence[Fault] = (), *, code: str = "") -> None:
        self.claim = claim
        self.faults = tuple(faults)
        self.codes = tuple(fault.code for fault in self.faults) or (code,)
        super().__init__(self._message())

    @property
    def code(self) -> str:
        """The code of the claim, or of the first fault."""
        return self.codes[0]

    def _message(self) -> str:
        if not self.faults:
            return f"{self.claim} [{self.code}]" if self.code else self.claim
        count = len(self.faults)
        head = f"{self.claim} ({count} fault{'s' if count > 1 else ''})"
        return "\n\n".join([head, *map(str, self.faults)])

    def __reduce__(self) -> tuple[object, ...]:
        return _again, (type(self), self.claim, self.faults, self.code)


class NotExact(MupscaleError):  # noqa: N818 - what was found, in the words of a user
    """What was asked for was measured, or is known, not to be exact.

    >>> import mupscale as mu
    >>> isinstance(mu.MupscaleError("no exact plan was found", code="search.no_exact_plan"), mu.errors.NotExact)
    True
    """


class Undecided(MupscaleError):  # noqa: N818
    """What is known does not decide whether or how growth is exact; more may: a loss, a declaration, a rule.

    All faults of such an error are open. One that has any other fault besides is not `Undecided`: more would not help.

    >>> import mupscale as mu
    >>> from torch import nn
    >>> class Own(nn.Linear): ...
    >>> try:
    ...     mu.grow(Own(2, 4), lambda: Own(2, 8))
    ... except mu.errors.Undecided as error:
    ...     print(error.code)
    proof.missing
    """


class WrongArgument(MupscaleError, ValueError):  # noqa: N818
    """A value that was passed, or one that is missing, cannot be used; a `ValueError` too.

    >>> import mupscale as mu
    >>> try:
    ...     mu.plans.plan_between(64, 64, 256)
    ... except ValueError as error:
    ...     print(error.code)
    argument.not_a_function
    """


class DamagedFile(MupscaleError):  # noqa: N818
    """A file or a stored record is cut short, damaged, or not what it should be.

    >>> import mupscale as mu
    >>> try:
    ...     mu.Plan.from_json("{")
    ... except mu.errors.DamagedFile as error:
    ...     print(error.code)
    json.not_json
    """


TYPES: dict[type[MupscaleError], str] = {
    NotExact: """
        axis.not_whole_copies axis.padding_changes_mean axis.padding_without_gain
        axis.parts_differ_in_copies axis.shrinks_by_copies depth.block_changes_output depth.gradient_differs
        depth.new_part_awake depth.odd_waking_gradient depth.waking_changes_loss experts.gradient_differs
        experts.loss_differs experts.moved_before_waking experts.waking_changes_loss family.rows_change_the_loss
        growth.gradient_differs growth.outputs_differ growth.waking_moves_loss layout.cannot_be_cut layout.heads_differ layout.not_aligned
        layout.pad_between_copies model.embedding_max_norm model.norm_groups_grow model.parametrized_weight
        model.weight_norm_direction optimizer.cannot_be_exact optimizer.decay_of_folded_gain
        optimizer.divides_zero_by_zero optimizer.measures_folded_gain optimizer.not_widened_exactly
        optimizer.refused_by_row optimizer.takes_no_padding proof.run_deviates
        schedule.absolute_rate schedule.reads_base search words.padding_row_moves""",
    Undecided: """
        axis.padding_leaks axis.padding_of_norm layout.read_but_not_written layout.undeclared
        model.growing_integer_buffer model.unclear_buffer optimizer.unknown_class optimizer.unknown_setting
        plan.mixes_channels plan.rows_grow plan.tied_readout plan.unknown_role proof.attribute_not_carried
        proof.control_too_small proof.missing proof.tensor_not_reached schedule.unknown_scheduler
        search.tensor_undecided""",
    WrongArgument: """
        advice argument axis.factor_out_of_range axis.no_parts axis.not_a_factor axis.not_an_axis axis.out_of_range
        axis.unknown_role clip depth.order_does_not_fit depth.order_missing depth.order_not_measured
        depth.order_not_one_list depth.wrong_places factory.not_a_module goal layout.axis_not_named
        layout.not_a_divisor layout.not_a_layout layout.other_sizes noise.above_norm noise.needs_loss
        noise.new_weights_alone noise.no_such_dimension noise.no_such_row noise.not_a_size noise.not_given
        noise.other_number_of_sizes noise.pattern_matches_nothing noise.rise_and_steps noise.sigma_or_t
        noise.unknown_tensor noise.zero_rise option plan.no_such_name plan.not_given plan.wrong_roles
        proof.batches_without_step proof.no_optimizer_stepped proof.nothing_to_measure
        proof.other_number_of_optimizers proof.step_returns_no_number proof.step_without_backward
        proof.too_few_batches rates.lr_and_peak recipe.needs_loss recipe.with_other_settings run.model_missing
        run.no_optimizers run.not_exactly_one run.other_model scale schedule.shares_above_one
        schedule.stages_not_increasing schedule.step_cost_missing schedule.step_cost_unused schedule.unknown_shape
        search.loss_not_finite search.loss_not_repeatable""",
    DamagedFile: """
        archive checkpoint.part_missing checkpoint.tensor_missing dcp.chunk_not_stored dcp.chunk_sticks_out
        dcp.chunk_unlike_metadata dcp.chunks_do_not_tile dcp.entries_stored_nowhere dcp.malformed_metadata
        dcp.negative_offset dcp.not_a_plain_value deepspeed.optimizer_malformed deepspeed.settings_malformed
        directory.index_lacks_tensor directory.index_names_missing_tensor directory.index_without_map
        file.changed_while_read file.cut_short file.lfs_pointer growth.malformed_provenance growth.not_a_record
        growth.other_provenance_version growth.plan_hash_differs growth.record_incomplete growth.record_malformed
        growth.request_malformed header job.bytes_differ
        job.malformed_record job.wrong_format json noise.malformed_record pickle plan.contradicts_itself
        plan.edits_constants plan.malformed_record plan.not_a_family_plan plan.static plan.wrong_format
        recipe.malformed_record recipe.wrong_format
        store.not_a_journal study.checkpoint_damaged""",
}
"""The type of an error by the codes and topics of its faults; what is not listed has none of its own."""
_BY_CODE = {word: kind for kind, words in TYPES.items() for word in words.split()}


def _kind(codes: Sequence[str]) -> type[MupscaleError]:
    """The type of the first fault; `Undecided` only where every fault is.

    >>> [_kind(codes).__name__ for codes in (["json.not_json"], ["proof.missing", "goal.not_given"], ["disk.is_full"])]
    ['DamagedFile', 'WrongArgument', 'MupscaleError']
    """
    kinds = [_BY_CODE.get(code) or _BY_CODE.get(code.partition(".")[0], MupscaleError) for code in codes]
    return next((kind for kind in kinds if kind is not Undecided), kinds[0])


def _again(kind: type[MupscaleError], claim: str, faults: tuple[Fault, ...], code: str) -> MupscaleError:
    return kind(claim, faults, code=code)


def raise_faults(claim: str, faults: Iterable[Fault]) -> None:
    """Raise one error that lists every fault, or return when there are none."""
    collected = tuple(faults)
    if collected:
        raise MupscaleError(claim, collected)
