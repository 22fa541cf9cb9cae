"""The model-parallel groups of one rank (cp, tp, ep) that the layers of its module use."""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from actors.runtime.program import Groups
from pipelines.training.workload.ring import positions


@dataclass(frozen=True)
class ParallelGroups:
    """The process groups that a model's layers use; the default is one rank without parallelism.

    `seq_len` is the length of full sequences, which `cp` and then `tp` shard. For a model with
    experts, `sequence` is the group of ranks that share a microbatch's tokens (over cp and tp), and
    `ep` the group over which the experts are sharded.
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
    def of(cls, groups: Groups, seq_len: int) -> ParallelGroups:
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
        """Whether this rank's hidden states cover all tokens of a sample."""
        return self.num_cp == self.num_tp == 1

    @property
    def num_held(self) -> int:
        """The number of tokens of a sequence on this `cp` rank, before `tp` shards them."""
        return len(positions(self.seq_len, self.cp_rank, self.num_cp))

    @property
    def counts_loss(self) -> bool:
        """Whether this rank adds its losses to the sum: all ranks of a `tp` group have the same."""
        return self.tp_rank == 0

    @property
    def records_samples(self) -> bool:
        """Whether this rank records the samples that its data rank reads."""
        return self.tp_rank == self.cp_rank == self.pp_rank == 0


ALONE = ParallelGroups()
