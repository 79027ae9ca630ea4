"""What the cached top-k of a corpus takes on disk: bytes per response token, and megabytes for 1M tokens.

    make cache-size                                          (needs a corpus: make distill, or stages=[corpus])
    python scripts/topk_cache_size.py artifacts/latest/corpus

Sizes are those of the Parquet column chunks, as their own metadata gives them.
"""

import json
import sys
from pathlib import Path

import pyarrow.compute as pc
import pyarrow.parquet as pq

TOPK_COLUMNS = ("topk_ids", "topk_logprobs")
#: int32 id and fp16 log-probability.
RAW_BYTES_PER_ENTRY = 4 + 2


def cache_size(folder: Path) -> dict[str, float]:
    """Sizes of the shards in the corpus stage's `folder`.

    Raises:
        ValueError: there are no shards, or they hold no top-k.
    """
    files = sorted((folder / "shards").glob("*.parquet"))
    if not files:
        raise ValueError(f"{str(folder)!r} holds no shards/*.parquet: name the folder of a corpus stage")
    stored, all_columns, num_entries, num_tokens = 0, 0, 0, 0
    for file in files:
        metadata = pq.ParquetFile(file).metadata
        for group in (metadata.row_group(index) for index in range(metadata.num_row_groups)):
            for column in (group.column(index) for index in range(group.num_columns)):
                all_columns += column.total_compressed_size
                is_topk = column.path_in_schema.split(".")[0] in TOPK_COLUMNS
                stored += column.total_compressed_size if is_topk else 0
        table = pq.read_table(file, columns=["response_token_ids", "topk_ids"])
        num_tokens += pc.sum(pc.list_value_length(table["response_token_ids"])).as_py()
        num_entries += pc.sum(pc.list_value_length(pc.list_flatten(table["topk_ids"]))).as_py() or 0
    if num_entries == 0:
        raise ValueError(f"{str(folder)!r} holds no top-k log-probabilities: it was made with corpus.topk=0")
    k = num_entries / num_tokens
    return {
        "k": k,
        "num_response_tokens": num_tokens,
        "bytes_per_token": stored / num_tokens,
        "bytes_per_token_uncompressed": RAW_BYTES_PER_ENTRY * k,
        "mb_per_million_tokens": stored / num_tokens,
        "share_of_corpus": stored / all_columns,
    }


def main(argv: list[str]) -> int:
    """Print the sizes as JSON."""
    try:
        print(json.dumps(cache_size(Path(argv[0] if argv else "artifacts/latest/corpus")), indent=2))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
