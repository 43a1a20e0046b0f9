"""Can the files be read, and do they agree with one another?"""

from __future__ import annotations

from collections.abc import Iterator

from pytest_specdecode.checkpoint import CONFIG_NAME, read_json_object
from pytest_specdecode.checks.registry import Context, Inconclusive, check
from pytest_specdecode.errors import CheckpointError
from pytest_specdecode.findings import Finding

_REFETCH = "fetch or write the file again; a checkpoint that cannot be read whole is not judged in part"


@check(
    "files.readable",
    title="config.json and every header parse; sizes, offsets and dtypes are consistent, nothing is cut or trailing",
    why="Some loaders read what is left of a cut shard as zeros, and the draft is served with them.",
    needs=("config", "headers"),
    anywhere=True,
    example="a shard that was cut short in an upload, or has bytes after its last tensor",
    fix="export or download the named file again",
)
def readable(context: Context) -> Iterator[Finding]:
    """Faults of the configuration and of single weights files."""
    checkpoint = context.draft.checkpoint
    for fault in checkpoint.faults:
        yield _from_fault(context, fault)
    for fault in checkpoint.config_oddities:
        yield context.warn(
            f"{fault.brief}; {'the last value counts' if fault.got is None else 'it is read as absent'}",
            where=f"config.json: {fault.key}",
            got=fault.got,
            fix="write it as standard JSON; strict readers refuse the whole file",
        )
    side = checkpoint.path / "hf_quant_config.json"
    try:
        if side.is_file():
            read_json_object(side)
    except CheckpointError as fault:
        broken = True
        yield _from_fault(context, fault)
    else:
        broken = False
    if not checkpoint.faults and not broken and not checkpoint.has_weights:
        raise Inconclusive("no weights lie beside config.json; only the configuration was read", "tensors")


@check(
    "files.index",
    title="every shard named exists, every tensor lies where the index says and only there, sizes agree",
    why="A missing shard loads as uninitialised memory in some engines, a file beside the index in some and not in others.",
    needs=("headers",),
    anywhere=True,
    example="an index that names model-00002-of-00002.safetensors where no such file lies",
    fix="write the index anew from the shards that are there, and take strangers out of the directory",
)
def index(context: Context) -> Iterator[Finding]:
    """Contradictions between the index, the shards and the directory."""
    checkpoint = context.draft.checkpoint
    if not checkpoint.has_weights:
        raise Inconclusive("no weights lie beside config.json; give the whole checkpoint directory", "tensors")
    for fault in checkpoint.index_faults:
        yield _from_fault(context, fault)
    unread = [fault for fault in checkpoint.faults if fault.path != str(checkpoint.path / CONFIG_NAME)]
    if unread and not checkpoint.index_faults and not checkpoint.unindexed:
        raise Inconclusive(f"the weights cannot all be read: {unread[0]}")
    if not checkpoint.has_index:
        return
    if checkpoint.unindexed:
        yield context.fail(
            "weights files lie beside an index that does not name them",
            where=str(checkpoint.path),
            got=checkpoint.unindexed,
            due="only the shards that the index names",
            fix="remove them, or write the index anew; engines that load every file read them, others do not",
        )
    stored = sum(header.end - header.start for header in checkpoint.tensors.values())
    total = checkpoint.index_total_size
    if total is not None and total != stored and not checkpoint.faults and not checkpoint.index_faults:
        yield context.warn(
            "the index's total_size is not what the shards hold",
            where="metadata.total_size",
            got=total,
            due=stored,
            fix="write the index anew from the shards",
        )


@check(
    "files.pickle",
    title="weights are safetensors; pickles are read with weights_only and reported",
    why="A pickle can run code when it is loaded, and has no header that could be read without loading it.",
    severity="warning",
    needs=("headers",),
    anywhere=True,
    example="a pytorch_model.bin in the place of, or beside, model.safetensors",
    fix="save the weights as safetensors and leave the pickle out",
)
def pickle(context: Context) -> Iterator[Finding]:
    """Pickled weights."""
    checkpoint = context.draft.checkpoint
    if checkpoint.pickles:
        used = [name for name in checkpoint.pickles if name in checkpoint.files]
        yield context.warn(
            "weights are stored as pickles" if used else "pickles lie beside the weights and are not read",
            where=str(checkpoint.path),
            got=checkpoint.pickles,
            due="*.safetensors",
            fix="save them with safetensors.torch.save_file and remove the pickles",
        )


@check(
    "files.code",
    title="no code comes with the checkpoint, or it is named; none is run",
    why="Code beside weights is run by readers that trust it; a side file with a tensor is ignored by most.",
    severity="warning",
    needs=("config",),
    anywhere=True,
    faults=("mask-embedding-file",),
    example="an auto_map in config.json, or a .py file or a mask_embedding.pt beside the weights",
    fix="leave the code out; a tensor that the draft needs belongs among its weights",
)
def code(context: Context) -> Iterator[Finding]:
    """`auto_map`, Python files and side files that carry tensors."""
    checkpoint = context.draft.checkpoint
    unread = context.draft.unread_config
    if checkpoint.config.get("auto_map"):
        yield context.warn(
            "auto_map names classes that only trust_remote_code loads; it was not followed",
            where="config.json: auto_map",
            got=checkpoint.config["auto_map"],
            fix="drop the key unless a reader needs it",
        )
    sources = sorted(path.name for path in checkpoint.path.glob("*.py"))
    if sources:
        yield context.warn("Python files lie beside the weights; none was run", where=str(checkpoint.path), got=sources)
    side = (checkpoint.path / "mask_embedding.pt").exists()
    if unread is not None and not sources and not side:
        raise Inconclusive(f"the configuration cannot be read: {unread}")
    if side:
        yield context.warn(
            "mask_embedding.pt replaces the mask token's embedding, and few engines read it",
            where=str(checkpoint.path / "mask_embedding.pt"),
            fix="store the mask's row in the embedding that the engine reads",
            fault="mask-embedding-file",
        )


def _from_fault(context: Context, fault: CheckpointError) -> Finding:
    place = ": ".join(part for part in (fault.path, fault.key) if part)
    return context.fail(fault.brief, where=place, got=fault.got, due=fault.due, fix=_REFETCH)
