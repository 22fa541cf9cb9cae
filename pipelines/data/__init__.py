"""Training data: corpora, tokenizers, prepared token shards, and the windows read from them."""

from pipelines.data.corpus import Corpus, find_corpus
from pipelines.data.opening import DataPlan, find_data, prepared_folder
from pipelines.data.prepare import prepare, prepare_at
from pipelines.data.prepared import Prepared, open_prepared
from pipelines.data.shards import Index, read_index
from pipelines.data.synthetic import RandomWindows
from pipelines.data.tokens import Tokenizer, find_tokenizer
from pipelines.data.windows import Batch, Samples, Windows, verify

__all__ = [
    "Batch",
    "Corpus",
    "DataPlan",
    "Index",
    "Prepared",
    "RandomWindows",
    "Samples",
    "Tokenizer",
    "Windows",
    "find_corpus",
    "find_data",
    "find_tokenizer",
    "open_prepared",
    "prepare",
    "prepare_at",
    "prepared_folder",
    "read_index",
    "verify",
]
