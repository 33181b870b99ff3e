"""Chat rows to micro-batches: reading, templating, loss masks, padding, packing, order. Imports neither models nor
losses.
"""

from megatron_ext.data.batch import FILLER, FILLER_ID, MicroBatch, collate, collate_packed
from megatron_ext.data.chat import ChatEncoder, EncodedSample
from megatron_ext.data.dataset import DataReport, SFTDataset
from megatron_ext.data.loader import EvalLoader, SampleOrder, TrainLoader
from megatron_ext.data.rows import Row, read_rows
from megatron_ext.data.run_data import RunData, load_run_data
from megatron_ext.data.tokenizer import check_same_tokenizer, find_pad_id, load_tokenizer

__all__ = [
    "FILLER",
    "FILLER_ID",
    "ChatEncoder",
    "DataReport",
    "EncodedSample",
    "EvalLoader",
    "MicroBatch",
    "Row",
    "RunData",
    "SFTDataset",
    "SampleOrder",
    "TrainLoader",
    "check_same_tokenizer",
    "collate",
    "collate_packed",
    "find_pad_id",
    "load_run_data",
    "load_tokenizer",
    "read_rows",
]
