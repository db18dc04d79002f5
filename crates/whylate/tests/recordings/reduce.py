#!/usr/bin/env python3
# SPDX-License-Identifier: MIT OR Apache-2.0
"""Makes a recording small and leaves out programs of the machine that have nothing to do with it.

reduce.py IN OUT [--late N] [--stacks N] [--without REGEX]

Of each snapshot at most N late events of each kind, N stacks and a few idle ones remain, none of which has a name that REGEX finds.
Frames stay the frames they were, with their indexes (docs/recording.md).
"""

import argparse
import json
import re
import struct
import subprocess
import zlib

IDLE = 5
INDEX = struct.Struct("<II8sQQQIIII")


def zstd(words, data):
    return subprocess.run(["zstd", "-q", *words], input=data, stdout=subprocess.PIPE, check=True).stdout


def frames(data):
    """Each frame's begin, end and lines."""
    at = 0
    while at < len(data):
        _, _, mark, begin, end, length, _, _, _, _ = INDEX.unpack_from(data, at)
        assert mark == b"whylate1" and length > 0, "a frame has no index"
        at += INDEX.size
        yield begin, end, zstd(["-dc"], data[at : at + length]).decode().splitlines()
        at += length


def kind(event):
    labels = event.get("labels", {})
    return labels.get("waited"), labels.get("thread"), labels.get("handler"), event["causes"][0]["kind"] if event.get("causes") else None


def reduced(line, arguments):
    line = json.loads(line)
    if line.get("line") == "header":
        line["kernel"] = re.sub(r"-fc-\w+$", "", line["kernel"])
        line["boot_id"] = "00000000-0000-4000-8000-000000000000"
    if "line" not in line:
        for part in ("series", "stacks", "late"):
            if part not in line:
                continue
            items = line[part]
            if arguments.without:
                items = [one for one in items if not re.search(arguments.without, json.dumps(one, ensure_ascii=False))]
            if part == "stacks":
                # Most threads of the kernel wait for work all the time.
                idle = [one for one in items if one.get("wait", {}).get("class") == "idle"]
                others = [one for one in items if one not in idle][: arguments.stacks]
                items = [one for one in items if one in others or one in idle[:IDLE]]
            if part == "late":
                seen = {}
                def has_room(event):
                    seen[kind(event)] = seen.get(kind(event), 0) + 1
                    return seen[kind(event)] <= arguments.late
                items = [event for event in items if has_room(event)]
            line[part] = items
            if not items and part != "series":
                del line[part]
    return json.dumps(line, ensure_ascii=False, separators=(",", ":"))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("input")
    parser.add_argument("output")
    parser.add_argument("--late", type=int, default=2)
    parser.add_argument("--stacks", type=int, default=40)
    parser.add_argument("--without")
    arguments = parser.parse_args()
    with open(arguments.input, "rb") as file:
        data = file.read()
    with open(arguments.output, "wb") as file:
        for begin, end, lines in frames(data):
            body = "".join(reduced(line, arguments) + "\n" for line in lines).encode()
            frame = zstd(["-19", "-c", "--check"], body)
            fields = struct.pack("<8sQQQII", b"whylate1", begin, end, len(frame), len(lines), zlib.crc32(frame))
            file.write(struct.pack("<II", 0x184D2A5E, 48) + fields + struct.pack("<II", zlib.crc32(fields), 0) + frame)


main()
