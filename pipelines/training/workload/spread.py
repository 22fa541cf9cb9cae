"""How one rank's module lies among others: what its layers must know of cp, tp and ep."""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from actors.runtime.program import Groups
from pipelines.training.workload.ring import positions


@dataclass(frozen=True)
class Spread:
    """The groups inside of a model's layers; by default the module is whole on one rank.

    `seq_len` is the length of whole sequences, which `cp` and then `tp` cut. `sequence` joins
    the ranks that share a microbatch's tokens (over cp and tp), where the model has experts;
    `ep` those among whom the experts are dealt.
    """

    seq_len: int = 0
    cp: ProcessGroup | None = None
    cp_rank: int = 0
    num_cp: int = 1
    tp: DeviceMesh | None = None
    tp_rank: int = 0
    num_tp: int = 1
    sequence: ProcessGroup | None = None
    ep: ProcessGroup | None = None
    num_ep: int = 1
    pp_rank: int = 0

    @classmethod
    def of(cls, groups: Groups, seq_len: int) -> Spread:
        layout, place, axes = groups.layout, groups.place, groups.mesh.mesh_dim_names or ()
        return cls(
            seq_len=seq_len,
            cp=groups.cp,
            cp_rank=place.cp,
            num_cp=layout.cp,
            tp=groups.mesh["tp"] if "tp" in axes else None,
            tp_rank=place.tp,
            num_tp=layout.tp,
            sequence=groups.sequence,
            ep=groups.experts.get_group("ep") if layout.ep > 1 and groups.experts else None,
            num_ep=layout.ep,
            pp_rank=place.pp,
        )

    @property
    def has_whole_sequences(self) -> bool:
        """Whether hidden states are those of all tokens of a sample."""
        return self.num_cp == self.num_tp == 1

    @property
    def num_held(self) -> int:
        """How many tokens of a sequence `cp` leaves to this rank, before `tp` cuts them."""
        return len(positions(self.seq_len, self.cp_rank, self.num_cp))

    @property
    def counts(self) -> bool:
        """Whether this rank counts the losses that it knows: those of one `tp` group know the
        same."""
        return self.tp_rank == 0

    @property
    def is_first_reader(self) -> bool:
        """Whether this rank alone tells which samples its data rank has read."""
        return self.tp_rank == self.cp_rank == self.pp_rank == 0


ALONE = Spread()
