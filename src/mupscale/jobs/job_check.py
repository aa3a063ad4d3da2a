"""Whether a job is sound: names stay in their folder, and every output byte is written exactly once.

Knows: what must hold of a job before a worker touches a disk. Opens nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod

from ..errors import Fault, MupscaleError
from ..files.elsewhere import DCP_METADATA
from ..files.floats import FLOATS
from ..files.places import Place, item_size
from ..files.strict import Reason, path_fault, printable, raise_few
from ..runs.growth_record import NAME as ABOUT
from .job import Job, Move, window

PARTIAL = ".partial"
JOURNAL = "journal-"
"""How the names of journals begin."""
JOB = "mupscale.job.json"
CONFIG = "config.json"
_SMALLEST_BLOCK, _LARGEST_BLOCK = 1 << 10, 1 << 26
_MOST_UNITS = 50_000_000  # one byte of memory each; with blocks of 8 MiB they reach 400 TB


def sound_job(raw: bytes) -> Job:
    """Read what `Job.to_json` wrote; a job that would write anything odd is refused with all its faults."""
    job = Job.from_json(raw)
    check_job(job)
    return job


def check_job(job: Job) -> None:
    """Raise one error with all faults of a job. A sound job writes nothing outside its output."""
    faults = [*_names(job), *_block(job)]
    outputs = {file.name: file.size for file in job.files}
    inputs = {file.name: file.size for file in job.sources}
    for move in job.moves:
        faults += _places(move, outputs, inputs)
        faults += [Fault(wrong.code, printable(move.name), wrong.what) for wrong in _kernel(move)]
    raise_few("this job is not sound", faults)
    raise_few("this job does not write every byte once", _tiling(job))


def _names(job: Job) -> Iterator[Fault]:
    seen: set[str] = set()
    for kind, names in (
        ("file", [file.name for file in job.files]),
        ("carried file", [file.name for file in job.carried]),
        ("text", [text.name for text in job.texts]),
    ):
        for name in names:
            wrong = path_fault(name)
            if wrong is None and (name in (JOB, ABOUT) or name.startswith(JOURNAL)):
                what = f"this name is taken; what {ABOUT} says goes into the job's `about`"
                wrong = Reason("job.name_is_taken", what)
            parts = name.split("/")
            hidden = [
                part for at, part in enumerate(parts) if part[:1] == "." and parts[at:] != [DCP_METADATA]
            ]
            if wrong is None and (hidden or any(part.endswith(PARTIAL) for part in parts)):
                what = f"a name that begins with a dot or ends in {PARTIAL} is taken for unfinished"
                wrong = Reason("job.name_looks_unfinished", what)
            if wrong is None and name in seen:
                wrong = Reason("job.name_written_twice", "written twice")
            seen.add(name)
            if wrong is not None:
                yield Fault(wrong.code, f"{kind} {printable(name)}", wrong.what)
    for source in job.sources:
        if (wrong := path_fault(source.name)) is not None:
            yield Fault(wrong.code, f"base file {printable(source.name)}", wrong.what)


def _block(job: Job) -> Iterator[Fault]:
    if not _SMALLEST_BLOCK <= job.block_bytes <= _LARGEST_BLOCK:
        yield Fault(
            "job.block_size_out_of_range",
            "block_bytes",
            f"{job.block_bytes}, expected {_SMALLEST_BLOCK} to {_LARGEST_BLOCK}",
        )
    elif sum(file.size for file in job.files) // job.block_bytes > _MOST_UNITS:
        yield Fault(
            "job.too_many_blocks",
            "block_bytes",
            f"blocks of {job.block_bytes} bytes are too many",
            "use larger blocks",
        )


def _places(move: Move, outputs: Mapping[str, int], inputs: Mapping[str, int]) -> Iterator[Fault]:
    for place, sizes in [(move.target, outputs), *((source, inputs) for source in move.sources)]:
        if place.file not in sizes:
            yield Fault(
                "job.file_not_in_job",
                printable(move.name),
                f"{printable(place.file)} is not a file of this job",
            )
        elif (wrong := _place(place, sizes[place.file])) is not None:
            yield Fault(wrong.code, printable(move.name), wrong.what)


def _place(place: Place, size: int) -> Reason | None:
    try:
        end = place.end
    except MupscaleError as error:
        return Reason(error.code, error.claim)
    if end > size:
        return Reason("job.place_outside_file", f"ends at byte {end} of {place.file}, which has {size}")
    return None


def _kernel(move: Move) -> Iterator[Reason]:
    """Faults that the kernel would refuse, found before work starts."""
    if move.read_cells:
        odd = list(_cells(move))
        yield from odd
        if odd:
            return
    making, noise = move.making, move.making.noise
    wide = tuple(window(making.wide_shape, move.cells)[1])
    base = tuple(window(making.base_shape, move.read_cells)[1]) if move.sources else ()
    if wide != move.target.shape:
        yield Reason("job.axes_other_shape", f"its axes give shape {wide}, its place has {move.target.shape}")
    if not all(axis.duplicates for axis in making.axes):
        yield Reason("axis.not_whole_copies", "its axes do not grow by whole copies")
    if len(making.mean) > 1 or any(
        dim >= len(making.axes) or not making.axes[dim].base for dim in making.mean
    ):
        yield Reason(
            "plan.mean_in_parts",
            f"new channels are means along dimensions {making.mean}, expected one dimension of {len(making.axes)}",
        )
    if move.sources:
        yield from _sources(move, base)
    floating = move.target.dtype in FLOATS and all(source.dtype in FLOATS for source in move.sources)
    if not floating and (
        not making.scale.is_one or making.shift or making.pad or making.mean or noise is not None
    ):
        yield Reason("scale.not_a_float_tensor", f"a tensor of {move.target.dtype} is copied, never scaled")
    if not floating and any(source.dtype != move.target.dtype for source in move.sources):
        yield Reason("job.dtype_not_cast", f"{move.sources[0].dtype} is not cast to {move.target.dtype}")
    if noise is not None:
        for dim, code, does in (
            (noise.paired, "noise.no_copies_to_pair", "noise is paired"),
            (noise.split, "noise.no_copies_to_split", "entries are split"),
            (noise.apart, "noise.no_copies_to_part", "copies part"),
        ):
            if dim is not None and not (dim < len(making.axes) and making.axes[dim].k > 1):
                yield Reason(code, f"{does} along dimension {dim}, which has no copies")
        if noise.apart is not None and not isinstance(noise.std, float):
            yield Reason("noise.many_sizes_apart", "copies part by noise of one size, and it has several")
        if noise.without_row is not None and not noise.without_row < prod(making.wide_shape[:1]):
            yield Reason(
                "noise.no_such_row",
                f"row {noise.without_row} gets no noise, and there are {prod(making.wide_shape[:1])}",
            )
        if noise.zeros is not None and any(dim >= len(making.axes) for dim in noise.zeros.cut):
            yield Reason(
                "noise.no_such_dimension",
                f"zeros stay along dimensions {noise.zeros.cut}, and there are {len(making.axes)}",
            )
        sizes = (factor.size for axis in making.axes for part in axis.segments for factor in part)
        if noise.zeros is not None and noise.zeros.copied and not all(sizes):
            yield Reason("noise.no_units_to_copy", "new units are copies, and there are no units to copy")
        mean = None if noise.zeros is None else noise.zeros.mean
        if mean is not None and len(mean) != prod(making.wide_shape[1:]):
            yield Reason(
                "noise.other_row_length",
                f"a new row of {len(mean)} numbers, and a row has {prod(making.wide_shape[1:])}",
            )
        if isinstance(noise.std, tuple) and making.wide_shape[:1] != (len(noise.std),):
            yield Reason(
                "noise.other_number_of_sizes",
                f"{len(noise.std)} sizes of noise for {len(making.axes)} axes {list(map(str, making.axes[:1]))}",
            )


def _cells(move: Move) -> Iterator[Reason]:
    """A stored part must be made from the part of the base that its sources hold, and from nothing else."""
    axes = move.making.axes
    if {len(move.cells), len(move.read_cells)} != {len(axes)}:
        yield Reason(
            "job.other_number_of_cells",
            f"{len(move.cells)} cells for {len(axes)} axes",
        )
        return
    for dim, (axis, cell, base_cell) in enumerate(zip(axes, move.cells, move.read_cells, strict=True)):
        (which, count), (base_which, base_count) = cell, base_cell
        fits = which < count and base_which < base_count and axis.wide % count == 0
        if not fits or (move.sources and axis.base % base_count):
            yield Reason("job.cell_not_a_part", f"cell {which} of {count} is not a part of axis {axis}")
            continue
        size, room = axis.wide // count, axis.base // base_count
        low, high = move.making.reads.along(dim, which * size, (which + 1) * size)
        if move.sources and low < high and not base_which * room <= low < high <= (base_which + 1) * room:
            yield Reason(
                "job.cell_reads_outside",
                f"cell {which} of {count} of axis {axis} reads entries of the base outside cell {base_which} of {base_count}",
            )


def _sources(move: Move, base: tuple[int, ...]) -> Iterator[Reason]:
    shapes, join = [source.shape for source in move.sources], move.making.join
    if len({source.dtype for source in move.sources}) > 1:
        yield Reason("job.sources_differ_in_dtype", "its sources have different dtypes")
    if len(shapes) > 1 and join is None:
        yield Reason(
            "plan.sources_without_join", f"{len(shapes)} sources and no dimension to join them along"
        )
    elif join is None:
        if shapes[0] != base:
            yield Reason(
                "job.source_other_shape", f"its axes start at shape {base}, its source has {shapes[0]}"
            )
    else:
        dim, parts = join.dim, [join.part(shape) for shape in shapes]
        if dim >= len(base) or any(len(part) != len(base) for part in parts):
            yield Reason(
                "job.sources_cannot_be_joined",
                f"sources of shapes {shapes} cannot be joined along dimension {dim}",
            )
            return
        rest = {(*part[:dim], *part[dim + 1 :]) for part in parts}
        if rest != {(*base[:dim], *base[dim + 1 :])} or sum(part[dim] for part in parts) != base[dim]:
            yield Reason("job.sources_join_to_other", f"sources of shapes {shapes} do not join to {base}")


def _tiling(job: Job) -> Iterator[Fault]:
    """Chunks and moves, in order, must meet end to end from the first byte of a file to its last."""
    parts: dict[str, list[tuple[int, int, str]]] = {file.name: [] for file in job.files}
    for file in job.files:
        parts[file.name] += [(at, at + len(raw), "fixed bytes") for at, raw in file.chunks]
    for move in job.moves:
        size = prod(move.target.shape) * item_size(move.target.dtype)
        parts[move.target.file].append((move.target.offset, move.target.offset + size, move.name))
    for file in job.files:
        at = 0
        for start, end, name in sorted(parts[file.name]):
            if start != at:
                yield Fault(
                    "job.gap_or_overlap",
                    printable(name),
                    f"begins at byte {start} of {file.name}, expected {at}",
                )
            at = end
        if at != file.size:
            yield Fault(
                "job.bytes_left_unwritten", file.name, f"{file.size} bytes, of which {at} are written"
            )
