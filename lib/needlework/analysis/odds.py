"""How often a feature is there: for no reason of interest (`BACKGROUND`), or because of a class (`Signature`)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

# How often a feature is there for a reason that is not the class in question.
BACKGROUND = {
    **dict.fromkeys(
        ("comb", "comb_warm", "placement", "crossed_identity", "judge_wrong", "truncated", "tiny_prompt", "false_hit"),
        0.02,
    ),
    **dict.fromkeys(("last_chunk_only", "warm_vacuous", "cold_loss_only", "reload_loss", "reference_same"), 0.03),
    **dict.fromkeys(("length_estimate", "long_suffix_heals", "padded_loss", "pd_loss", "draft_accept"), 0.03),
    **dict.fromkeys(
        ("position_ceiling", "far_from_end", "budget", "warm_loss", "abort_loss", "abort_poison", "token_zero"), 0.05
    ),
    **dict.fromkeys(("drift", "continue_loss", "load_loss", "foreign", "first_right", "loops", "flips_serial"), 0.06),
    **dict.fromkeys(("edge", "controls_fail"), 0.08),
    **dict.fromkeys(("past_budget", "far_lost", "worse_than_blind"), 0.06),
    "below_budget": 0.03,
    "other_topk": 0.015,  # a count of selected entries that is not the configured one says what it says
    **dict.fromkeys(("edge_at_window", "edge_at_limit", "edge_at_stash", "edge_at_chunk"), 0.08),
    **dict.fromkeys(("edge_at_topk", "edge_at_other_k", "near_misses", "many_faces"), 0.12),
    **dict.fromkeys(("flips_loaded", "empty"), 0.15),
    **dict.fromkeys(("sharp", "soft_fall", "refusals", "wrong_needle", "rare_loss"), 0.30),
    "plain_loss": 0.50,
    "both_arms_lose": 0.50,
    "loss": 0.90,
    "buffers_equal": 0.60,
    "repeats_agree": 0.60,
    "pages_right": 0.50,
    "short_loss": 0.20,
    "batch_numerics": 0.10,
    "log_failed_load": 0.05,
    "log_truncated": 0.03,
    "log_nan": 0.03,
}
ELSEWHERE = 0.05  # any feature without a line above (flags that heal, page findings)


# A fault that leaves nothing beyond the budget, whichever of the selection's parts it sits in.
NOTHING_BEYOND_BUDGET = {
    "edge": 0.95,
    "sharp": 0.8,
    "soft_fall": 0.2,
    "edge_at_topk": 0.6,
    "edge_at_stash": 0.08,
    "far_from_end": 0.03,
    "past_budget": 0.95,
    "far_lost": 0.97,
    "worse_than_blind": 0.9,
    "repeats_agree": 0.6,
    "flips_serial": 0.05,
}


@dataclass(frozen=True)
class Signature:
    """One fault class or lookalike.

    `forms`: other faces that the class may show, each with its share of the cases and the odds that differ. Features of
    one face come together, so that odds of single features would call a rarer face impossible.
    """

    code: str
    title: str
    expects: dict[str, float]
    decisive: str
    citations: tuple[str, ...] = ()
    prior: float = 1.0
    needs: tuple[str, ...] = ()  # it shows only where one of these was looked for; else it stays possible, and unlikely
    forms: tuple[tuple[float, dict[str, float]], ...] = ()

    def odds(self, feature: str) -> float:
        """P(feature | this face of the class), kept off 0 and 1 so that one odd row can not decide alone."""
        value = self.expects.get(feature, BACKGROUND.get(feature, ELSEWHERE))
        return min(0.985, max(0.015, value))

    @cached_property
    def faces(self) -> tuple[tuple[float, Signature], ...]:
        """(share, this class as it shows itself then): the usual face first."""
        usual = 1.0 - sum(share for share, _ in self.forms)
        others = ((share, replace(self, expects={**self.expects, **odds}, forms=())) for share, odds in self.forms)
        return ((usual, self), *others)
