# SPDX-License-Identifier: MIT OR Apache-2.0
"""Decodes a trace packet by packet, as far as it goes, and prints as JSON what is on its tracks. Fails where slices do not nest."""
import json
import sys

from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as protos


def packets(data):
    at = 0
    while at < len(data):
        assert data[at] == 0x0A, "a trace has packets only"
        at, length, shift = at + 1, 0, 0
        while True:
            if at >= len(data):
                return
            byte, at = data[at], at + 1
            length |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                break
        if at + length > len(data):
            return
        packet = protos.TracePacket()
        packet.ParseFromString(data[at : at + length])
        yield packet
        at += length


def value(annotation):
    if annotation.dict_entries:
        return {entry.name: value(entry) for entry in annotation.dict_entries}
    if annotation.array_values:
        return [value(one) for one in annotation.array_values]
    return annotation.string_value if annotation.HasField("string_value") else annotation.uint_value


with open(sys.argv[1], "rb") as file:
    data = file.read()
if "--cut" not in sys.argv:
    whole = protos.Trace()
    whole.ParseFromString(data)
    assert len(whole.packet) == len(list(packets(data)))
tracks, events, clocks = {}, [], []
for number, packet in enumerate(packets(data)):
    assert packet.trusted_packet_sequence_id == 1
    if packet.HasField("clock_snapshot"):
        clocks.append({clock.clock_id: clock.timestamp for clock in packet.clock_snapshot.clocks})
    elif packet.HasField("track_descriptor"):
        assert packet.track_descriptor.uuid not in tracks
        tracks[packet.track_descriptor.uuid] = packet.track_descriptor
    elif packet.HasField("track_event"):
        assert packet.timestamp_clock_id == 6, "on CLOCK_BOOTTIME"
        assert packet.track_event.track_uuid in tracks, "a track is described before it is used"
        events.append((packet.timestamp, number, packet.track_event))
# As a trace processor does: by time, and what is of one moment as it stands in the file.
events.sort(key=lambda event: event[:2])
open_slices, slices, counters, begun, ended = {}, [], [], {}, {}
for ts, number, event in events:
    track = tracks[event.track_uuid]
    names = []
    up = track
    while up:
        names.append(f"{up.thread.pid}/{up.thread.tid} {up.thread.thread_name}" if up.HasField("thread") else up.name)
        up = tracks[up.parent_uuid] if up.parent_uuid else None
    stack = open_slices.setdefault(event.track_uuid, [])
    if event.type == protos.TrackEvent.TYPE_COUNTER:
        figure = event.double_counter_value if event.HasField("double_counter_value") else event.counter_value
        counters.append({"track": track.name, "at": ts, "value": figure})
        continue
    if event.type == protos.TrackEvent.TYPE_SLICE_END:
        assert stack, f"nothing is open on {track.name}"
        stack.pop()["to"] = ts
        continue
    one = {
        "uuid": event.track_uuid,
        "track": names[0],
        "below": names[1:],
        "name": event.name,
        "from": ts,
        "to": ts,
        "depth": len(stack),
        "within": stack[-1]["name"] if stack else None,
        "starts": list(event.flow_ids),
        "ends": list(event.terminating_flow_ids),
        "told": {annotation.name: value(annotation) for annotation in event.debug_annotations},
        "frames": [frame.function_name for frame in event.callstack.frames],
    }
    for flow in one["starts"]:
        assert flow not in begun
        begun[flow] = (ts, number)
    for flow in one["ends"]:
        assert flow in begun, "a flow begins before it ends"
        assert flow not in ended
        ended[flow] = (ts, number)
    slices.append(one)
    if event.type == protos.TrackEvent.TYPE_SLICE_BEGIN:
        one["to"] = None
        stack.append(one)
if "--cut" not in sys.argv:
    assert set(begun) == set(ended), "each flow connects two slices"
    assert not any(open_slices.values()), "each slice ends"
print(json.dumps({"slices": slices, "counters": counters, "clocks": clocks}))
