"""The workload of a `transformers` causal language model: next-token prediction."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from elastic.geometry.model_limits import Limits
from elastic.geometry.regions import Region, chunk_interval
from elastic.geometry.sample_order import keyed_seed
from pipelines.data.synthetic import RandomWindows
from pipelines.data.windows import Batch, Samples
from pipelines.errors import UserError
from pipelines.hugging_face.adapters import (
    adapter_distribution,
    add_adapters,
    base_name,
    is_adapter,
    with_adapters,
)
from pipelines.hugging_face.anatomy import Anatomy, anatomy_of, why_random
from pipelines.hugging_face.building import (
    build,
    distribution,
    draw_tensor,
    output_embedding,
    text_config,
)
from pipelines.hugging_face.equal_blocks import number_of_equal_blocks, with_number
from pipelines.hugging_face.placeholders import Placeholder
from pipelines.hugging_face.routing.router_loss import RoutedLogits, has_router_loss, routed_logits
from pipelines.settings import HuggingFaceSettings, LoraSettings
from pipelines.training.attention import attention_interface
from pipelines.training.custom.modules.microbatch_draws import BlockSeeds, PassSeeds
from pipelines.training.models.expert_parallel import distribute_experts
from pipelines.training.models.next_token import NextToken
from pipelines.training.workload.initial_values import draw, slices_of
from pipelines.training.workload.parallel_groups import ALONE, ParallelGroups
from pipelines.training.workload.ring import positions
from pipelines.training.workload.workload import ModelShape, ModuleInputs, nothing

MASKS = ("create_causal_mask", "create_sliding_window_causal_mask", "create_masks_for_generate")
"""Functions of `transformers` that build masks which separate packed documents."""
TINY = {
    "model_type": "llama",
    "vocab_size": 8,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


class CausalLMWorkload(NextToken):
    """Any causal language model of the installed `transformers`, built from its config.

    Documents in a sequence are separated by their positions, which restart at 0.
    """

    def __init__(
        self,
        settings: HuggingFaceSettings,
        train: Samples,
        held_out: Samples | None,
        dtype: torch.dtype = torch.float32,
        lora: LoraSettings | None = None,
    ) -> None:
        """Raises `UserError` if `transformers` has no such model, or it does not fit the data."""
        self.settings = settings
        self.lora = lora if lora is not None and lora.rank else None
        self.example = build(settings.config)
        self.anatomy = anatomy_of(self.example)
        if self.lora:
            adapted = build(settings.config)
            add_adapters(adapted, self.lora)
            self.anatomy = with_adapters(self.anatomy, adapted)
        head = output_embedding(self.example)
        assert head is not None, "a causal language model has a head"
        super().__init__(head.get_parameter("weight").shape[0], train, held_out, dtype)
        self.cuts_head = self.anatomy.is_head_cut
        self.num_alike = number_of_equal_blocks(self.example, settings.config, self.anatomy.blocks)
        self.block_seeds = self._block_seeds()
        self._refuse_unfit_data()

    def _block_seeds(self) -> BlockSeeds | None:
        """The seeds of the modules that stages distribute, if the model draws."""
        names = [name for layer in self.shape().layers for name in layer.modules]
        return BlockSeeds(names) if names and why_random(self.example.config) else None

    def _refuse_unfit_data(self) -> None:
        if self.train.vocab_size > self.vocab_size:
            raise UserError(
                f"the model has {self.vocab_size} tokens, but the data have "
                f"{self.train.vocab_size}: prepare them with the model's tokenizer "
                "(--set data.tokenizer=FOLDER/tokenizer.json)"
            )
        has_documents = self.is_far or self.train.read([0]).documents is not None
        if has_documents and not separates_documents(self.example):
            raise UserError(
                f"{type(self.example).__name__} has no mask that separates the documents of a "
                "sequence: --set data.attend_across_documents=true"
            )

    @property
    def why_unmergeable(self) -> str | None:
        if has_router_loss(self.example):
            return "the load-balancing loss of the routers is that of a microbatch"
        return None

    def with_blocks(self, number: int) -> CausalLMWorkload:
        settings = HuggingFaceSettings(config=with_number(self.settings.config, number))
        return CausalLMWorkload(settings, self.train, self.held_out, self.dtype, self.lora)

    def module(self, parallel: ParallelGroups = ALONE) -> nn.Module:
        if parallel.cp is not None:
            attention_interface.register()
        name = None if parallel.cp is None else attention_interface.NAME
        model = build(self.settings.config, name)
        if self.lora:
            add_adapters(model, self.lora)
        distribute_experts(model, self.shape(), parallel)
        if self.block_seeds is not None:
            self.block_seeds.attach(model)
        model.forward = staged_forward(model, self.anatomy, parallel.cp, self.block_seeds)
        return model

    def blocks(self, module: nn.Module) -> Sequence[nn.Module]:
        blocks = (module.get_submodule(name) for name in self.anatomy.blocks)
        return [block for block in blocks if not isinstance(block, Placeholder)]

    def shape(self) -> ModelShape:
        return self.anatomy.shape

    def limits(self) -> Limits:
        return self.shape().limits

    def draw(
        self,
        name: str,
        shape: tuple[int, ...],
        region: Region,
        seed: int,
        interrupt: Callable[[], None] = nothing,
    ) -> Tensor:
        """A region of an initial value, distributed as by `transformers` and `peft`.

        If the distribution is unknown, the whole tensor is drawn and the region taken from it.
        """
        base = base_name(name)
        known = (
            adapter_distribution(name, shape)
            if is_adapter(name)
            else distribution(self.example, base)
        )
        if known is not None:
            return draw(known, name, seed, shape, region, interrupt)
        key = keyed_seed("initial", seed, name)
        return draw_tensor(self.example, base, key)[slices_of(region)].clone()

    def feed(
        self, batch: Batch, device: torch.device, parallel: ParallelGroups, *seeds: int
    ) -> ModuleInputs:
        keywords, inputs, targets = {}, batch.tokens, batch.targets
        documents = batch.documents
        if self.block_seeds is not None and seeds:
            num_each = len(batch.tokens) // len(seeds)
            keywords["seeds"] = torch.tensor(seeds).repeat_interleave(num_each)
        if parallel.num_cp > 1 and documents is None:
            documents = torch.zeros_like(inputs)
        if documents is not None:
            keywords["positions"] = positions_of(documents)
        if parallel.num_cp > 1 and documents is not None:
            held = positions(inputs.shape[1], parallel.cp_rank, parallel.num_cp)
            inputs, targets = inputs[:, held], targets[:, held]
            keywords = {"positions": keywords["positions"][:, held], "documents": documents}
        return ModuleInputs(inputs.to(device), keywords, targets.to(device))

    def loss(self, output: Tensor, targets: Tensor, parallel: ParallelGroups) -> Tensor:
        """The cross-entropy of the targets, and the routers' loss for each of them, summed."""
        if not isinstance(output, RoutedLogits):
            return super().loss(output, targets, parallel)
        total = super().loss(output.logits, targets, parallel)
        return total + self.num_tokens(targets) * output.imbalance.to(total.dtype)

    def flowing(self, layer: int, num_samples: int, parallel: ParallelGroups) -> Tensor:
        held = len(positions(self.seq_len, parallel.cp_rank, parallel.num_cp))
        if layer == 0:
            return torch.empty(num_samples, held, dtype=torch.int64, device="meta")
        width = text_config(self.example).hidden_size
        if layer == len(self.anatomy.shape.layers):
            width = self.vocab_size
            if self.cuts_head:
                width = chunk_interval(width, parallel.num_tp, parallel.tp_rank)[1]
        shape = (num_samples, held, width)
        return torch.empty(shape, dtype=self.dtype, device="meta", requires_grad=True)

    def miniature(self) -> CausalLMWorkload:
        """A tiny Llama: an arbitrary model cannot be made smaller."""
        samples = RandomWindows("train", 4, vocab_size=8, num_samples=8)
        return CausalLMWorkload(HuggingFaceSettings(config=TINY), samples, samples, self.dtype)


def separates_documents(model: nn.Module) -> bool:
    """Whether the model's masks separate the documents of a sequence by their positions."""
    kind = type(model)
    code = vars(sys.modules[kind.__module__])
    if "position_ids" not in signature(kind.forward).parameters:
        return False
    return any(name in code for name in MASKS) and "create_recurrent_attention_mask" not in code


def staged_forward(
    model: nn.Module,
    anatomy: Anatomy,
    ring: ProcessGroup | None = None,
    block_seeds: BlockSeeds | None = None,
) -> Callable[..., Tensor | RoutedLogits]:
    """The forward of a pipeline stage, which replaces the model's.

    It maps tokens, or hidden states of the stage before, to logits or hidden states for the next
    stage, and to the loss of the routers if the config requests it. `positions` (batch, length)
    restart with each document. If the tokens of a sequence are sharded over the group `ring`,
    `documents` are those of all tokens. `seeds` are those of each sample's microbatch, by which
    `block_seeds` seed draws.
    """
    whole: Callable[..., Any] = model.forward

    def forward(
        hidden: Tensor,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        seeds: Tensor | None = None,
    ) -> Tensor | RoutedLogits:
        inputs: dict[str, Any] = {
            ("inputs_embeds" if hidden.is_floating_point() else "input_ids"): hidden
        }
        if positions is not None:
            inputs["position_ids"] = positions.to(hidden.device)
        if block_seeds is not None:
            current = None
            if seeds is not None and model.training:
                current = PassSeeds(tuple(seeds.unique_consecutive().tolist()), hidden.device)
            block_seeds.begin_blocks(current)
        if ring is not None:
            assert documents is not None, "the ring needs the length of whole sequences"
            inputs["ring"] = attention_interface.RingPass(ring, documents)
        if isinstance(model.get_submodule(anatomy.head), Placeholder):
            base: Any = model.base_model
            flowing: Tensor = base(**inputs, use_cache=False).last_hidden_state
            return flowing
        output = whole(**inputs, use_cache=False)
        if has_router_loss(model):
            return routed_logits(model, output)
        logits: Tensor = output.logits
        return logits

    return forward


def positions_of(documents: Tensor) -> Tensor:
    """The position of each token in its document, int64, from document numbers (batch, length)."""
    places = torch.arange(documents.shape[1]).expand(documents.shape)
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return places - torch.where(begins, places, 0).cummax(1).values
