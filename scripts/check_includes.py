#!/usr/bin/env python3
"""Checks the arrows between rooms: a room includes only rooms above it, and what knows no tensor includes no libtorch.

    check_includes.py [ROOT]     prints each fault as file:line: message, and exits 1 if there is one
"""
import re
import sys
from pathlib import Path

# Top to bottom, as in the table of docs/architecture.md. Each may include itself and those before it.
LIBRARY = ["base", "mesh", "layout", "comm", "storage", "engine", "optim", "checkpoint", "planner", "profile", "debug"]
# What the rooms outside the library may include, besides themselves; None: anything. Models know nothing of how they are
# sharded, and examples show what a user writes.
OUTSIDE = {
    "models": {"tessera/base", "tessera/mesh", "tessera/layout"},
    "cli": {f"tessera/{room}" for room in LIBRARY} | {"tessera", "models"},
    "examples": {"tessera", "models"},
    "tests": None,
    "bench": None,
}
WITHOUT_TENSORS = {"tessera/base", "tessera/mesh", "tessera/layout"}
LIBTORCH = re.compile(r"(torch|ATen|c10|caffe2)/")
INCLUDE = re.compile(r'\s*#\s*include\s*(["<])([^">]+)[">]')


def room_of(path):
    """`tessera/comm` of tessera/comm/window.h, `tessera` of tessera/tessera.h, `models` of models/llama.h; else None."""
    parts = path.split("/")
    if parts[0] == "tessera":
        return "/".join(parts[:-1]) if len(parts) > 2 else "tessera"
    return parts[0] if parts[0] in OUTSIDE else None


def allowed(room):
    """The rooms that files of `room` may include; None if any."""
    if room.startswith("tessera/"):
        name = room.split("/")[1]
        return {f"tessera/{above}" for above in LIBRARY[: LIBRARY.index(name) + 1]} if name in LIBRARY else set()
    if room == "tessera":
        return {f"tessera/{each}" for each in LIBRARY} | {"tessera"}
    return OUTSIDE[room] and OUTSIDE[room] | {room}


def faults_in(path, source):
    """The faults of one file, given by its path from the root and its text, as (line number, message)."""
    room = room_of(path)
    may_include = allowed(room)
    if room.startswith("tessera/") and room.split("/")[1] not in LIBRARY:
        yield 1, f"the room {room} has no place in the order of rooms; give it one in scripts/check_includes.py"
    for number, line in enumerate(source.splitlines(), start=1):
        if path.endswith(".h") and re.match(r"\s*using\s+namespace\b", line):
            yield number, "`using namespace` in a header reaches every file that includes it"
        include = INCLUDE.match(line)
        if not include:
            continue
        quote, target = include.groups()
        if LIBTORCH.match(target) and room in WITHOUT_TENSORS:
            yield number, f"{room} knows no tensors: <{target}> must not be included here"
        if quote == "<":
            continue
        included = room_of(target)
        if "/" not in target or target.startswith("."):
            yield number, f'"{target}" is not a path from the root of the project'
        elif None not in (included, may_include) and included not in may_include:
            yield number, f"{room} must not include {included} (\"{target}\")"
    if path.endswith(".h") and not re.search(r"^#pragma once$", source, re.MULTILINE) and not path.endswith("-inl.h"):
        yield 1, "a header starts with #pragma once"


def faults_under(root):
    """The faults of all sources under `root`, as (path, line number, message)."""
    for folder in ("tessera", *OUTSIDE):
        for file in sorted((root / folder).rglob("*")):
            if file.suffix in (".h", ".cpp"):
                path = file.relative_to(root).as_posix()
                for number, message in faults_in(path, file.read_text(encoding="utf-8")):
                    yield path, number, message


def main():
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent
    faults = list(faults_under(root))
    for path, number, message in faults:
        print(f"{path}:{number}: {message}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
