"""The memory of preparation is bounded for a corpus of any size."""

import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytestmark = pytest.mark.slow

PROGRAM = """
import sys
from pathlib import Path
from pipelines.data.corpus import find_corpus
from pipelines.data.tokens import find_tokenizer
from pipelines.data import prepare

def peak_bytes():
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

small, *large = map(Path, sys.argv[1:])
prepare(find_corpus(str(small)), small.with_suffix(".out"), find_tokenizer())
before = peak_bytes()
for file in large:
    index = prepare(find_corpus(str(file)), file.with_suffix(".out"), find_tokenizer())
    print(file.stat().st_size, index.splits["train"].num_tokens, peak_bytes() - before)
"""


def test_preparing_50_mb_takes_less_memory_than_the_file_size(tmp_path: Path):
    words = "elastic training goes on from the very next step after a loss\n" * 16
    texts = [f"{i}: {words}" for i in range(50_000)]
    names = ("a.txt", "b.jsonl", "c.parquet", "d.arrow")
    small, jsonl, parquet, arrow = (tmp_path / name for name in names)
    small.write_text(words)
    with jsonl.open("w") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in texts)
    table = pa.table({"text": texts})
    pq.write_table(table, parquet, compression="none", use_dictionary=False)
    with pa.ipc.new_file(arrow, table.schema) as writer:
        writer.write_table(table, max_chunksize=1000)
    finished = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(small), *map(str, (jsonl, parquet, arrow))],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    lines = [list(map(int, line.split())) for line in finished.stdout.splitlines()]
    assert len(lines) == 3
    for num_bytes, num_tokens, growth_bytes in lines:
        assert min(num_bytes, num_tokens) > 45_000_000
        assert growth_bytes < num_bytes, finished.stdout
