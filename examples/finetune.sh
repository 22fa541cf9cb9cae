#!/bin/sh
# Fine-tuning from end to end with a tiny random model: trains adapters on conversations with three
# workers, kills two, removes one, exports the adapters and loads them with peft. Run it in an empty folder.
set -eu

python - <<'PYTHON'
import json

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=264,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    bos_token_id=None,
    eos_token_id=None,
)
AutoModelForCausalLM.from_config(config).save_pretrained("tiny")
with open("chats.jsonl", "w") as file:
    for number in range(200):
        pair = {"prompt": f"What comes after {number}?", "response": f"{number + 1}."}
        file.write(json.dumps(pair) + "\n")
PYTHON

elastic train finetune --run-name tuned --workers 1:3 --steps 30 --data chats.jsonl \
    --set init_from=tiny --set lora.rank=8 --set data.seq_len=128 --set batch=8 \
    --set optimizer.lr=1e-2 --set optimizer.warmup_steps=0 \
    --inject "kill worker 1 at step 8" --inject "kill worker 0 at step 14" \
    --inject "remove worker 2 at step 20"
elastic export tuned --out adapter

python - <<'PYTHON'
from peft import PeftModel
from transformers import AutoModelForCausalLM

model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("tiny"), "adapter")
print("loaded", sum(p.numel() for n, p in model.named_parameters() if "lora" in n), "numbers")
PYTHON
