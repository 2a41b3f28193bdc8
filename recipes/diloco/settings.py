"""What a decoupled-DiLoCo run is set to: one frozen record that syncer, learners and replays share."""

from dataclasses import dataclass

from zephon.errors import UsageError

CODECS = ("float32", "bf16", "int4")
MERGES = ("rda", "average")
LEASE = 256


@dataclass(frozen=True, slots=True)
class Settings:
    """Parameters of a run, named as in the paper (arXiv 2604.21428) where it names them.

    Raises:
        UsageError: a value that cannot hold.
    """

    learners: int = 4
    """M: learners that the run starts with; it begins when so many are there. More may join, any may leave."""

    rounds: int = 96
    """Rounds of the syncer, one an inner step of the learner that sets the pace; then everyone stops."""

    every: int = 24
    """H: rounds between two merges of the same fragment."""

    fragments: int = 24
    """P: parts of the model that are merged apart, the embedding in one of its own; at most as many as tensors."""

    quorum: int = 1
    """K: learners that must have made a step before a round closes. With fewer alive only merges pause."""

    overlap: int = 2
    """tau: inner steps before a learner would notice that a merged fragment is late; rounds in flight at once."""

    grace: int = 800
    """gamma, in thousandths: share of the measured slack that a round may wait for learners beyond the quorum."""

    grace_cap: int = 1000
    """Longest such wait, in thousandths of an inner step: a round is due every step, so more would pile up."""

    lease: int = LEASE
    """Inner steps of silence after which a learner is given up, so that what waits to be sent to it stays bounded; it
    starts again when it is reached. 0 never, but at the end of the run, where it is as with the usual lease."""

    alpha: float = 0.0
    """Share of its own fragment that a learner keeps when the merged one arrives."""

    outer_lr: float = 0.7
    """Learning rate of the outer SGD; 0.7 with momentum 0.9 is the DiLoCo lineage's, the paper prints none."""

    outer_momentum: float = 0.9
    """Nesterov momentum of the outer SGD; 0 with `outer_lr` 1 takes the merged parameters as they are."""

    merge: str = "rda"
    """How outer gradients are merged: "rda" (the embedding is always averaged), or "average"."""

    up: str = "bf16"
    """How fragments go to the syncer: "float32", or the difference to what both ends know as "bf16" or "int4"."""

    down: str = "bf16"
    """How merged fragments go to the learners."""

    def __post_init__(self) -> None:
        allowed = {
            "learners": self.learners >= 1,
            "rounds": self.rounds >= 1,
            "every": self.every >= 1,
            "fragments": self.fragments >= 1,
            "quorum": 1 <= self.quorum <= self.learners,
            "overlap": self.overlap >= 0,
            "grace": 0 <= self.grace <= 1000,
            "grace_cap": self.grace_cap >= 0,
            "lease": self.lease >= 0,
            "alpha": 0 <= self.alpha < 1,
            "outer_lr": self.outer_lr > 0,
            "outer_momentum": 0 <= self.outer_momentum < 1,
            "merge": self.merge in MERGES,
            "up": self.up in CODECS,
            "down": self.down in CODECS,
        }
        wrong = {name: getattr(self, name) for name, holds in allowed.items() if not holds}
        if wrong:
            raise UsageError(
                f"Settings that cannot hold: {wrong}. Counts are at least 1, quorum at most learners, grace 0 to 1000 "
                f"thousandths, alpha and outer_momentum in [0, 1), outer_lr above 0, merge one of {MERGES}, up and "
                f"down one of {CODECS}."
            )
