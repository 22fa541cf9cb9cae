"""An independent oracle: a model of `transformers`, trained in one process by plain PyTorch."""

import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM


def load(folder, dtype=torch.float64):
    # The eager implementation computes experts one by one, in every dtype.
    options = {"dtype": torch.float32, "experts_implementation": "eager"}
    return AutoModelForCausalLM.from_pretrained(folder, **options).to(dtype)


def train(model, batches, lrs, betas, weight_decay, max_grad_norm):
    """The loss and gradient norm of each step; trains the model in place.

    A batch is tokens, targets (-100: none) and positions; or several of these, whose gradients are
    accumulated.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [{"params": [p for p in parameters if p.ndim > 1], "weight_decay": weight_decay}]
    groups += [{"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0}]
    groups = [group for group in groups if group["params"]]
    optimizer = torch.optim.AdamW(groups, betas=betas, eps=1e-8, foreach=False)
    losses_and_norms = []
    model.train()
    for lr, batch in zip(lrs, batches, strict=True):
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.zero_grad()
        total, num_tokens = 0.0, torch.tensor(0)
        for tokens, targets, positions in batch if isinstance(batch, list) else [batch]:
            output = model(tokens, position_ids=positions, use_cache=False)
            logits, counted = output.logits.flatten(0, 1), (targets != -100).sum()
            loss = cross_entropy(logits, targets.flatten(), reduction="sum")
            if getattr(output, "aux_loss", None) is not None:
                loss = loss + counted * (model.router_aux_loss_coef * output.aux_loss).double()
            # The gradients are divided afterwards: the norms of transformers round to float32, in
            # backward too, and would round other numbers.
            loss.backward()
            total, num_tokens = total + loss.item(), num_tokens + counted
        for parameter in parameters:
            parameter.grad /= num_tokens
        norm = torch.nn.utils.clip_grad_norm_(parameters, max_grad_norm)
        optimizer.step()
        losses_and_norms.append((total / num_tokens.item(), norm.item()))
    return losses_and_norms
