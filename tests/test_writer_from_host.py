"""What an ending incident takes from the host tier, and what it leaves alone."""

from __future__ import annotations

import numpy as np
from writer_support import identity, introduce, make_firing, make_layouts, send_iteration, send_payload, wait_for

import flightrec
from flightrec.writer import messages
from flightrec.writer.client import WriterClient
from flightrec.writer.host_memory import HostMemory, Range, extent_bytes

NUM_RECORDS = 4


def fill(memory, entry, tick, layouts, byte):
    """One iteration whose every byte is ``byte``, each record a range of its own."""
    ranges, offset = [], entry * (1 << 16)
    for layout in layouts:
        length = extent_bytes(layout)
        ranges.append(Range(layout.segment, layout.offset_bytes, length, offset))
        memory.data[offset : offset + length] = bytes([byte]) * length
        offset += length
    memory.describe(entry, np.arange(len(layouts), dtype=np.int32), (entry + 1) * (1 << 16) - 8192, ranges)
    memory.complete(entry, tick)


def test_only_what_did_not_come_otherwise_and_is_whole_is_taken(tmp_path):
    memory = HostMemory.create(1 << 20)
    layouts = make_layouts(NUM_RECORDS)
    client = WriterClient.start(tmp_path, identity(), staging_bytes=1 << 20, host=memory)
    introduce(client, layouts)
    firing = make_firing(iteration=102, key=layouts[0].key)
    assert client.send(*messages.open_incident(1, firing, [firing]))
    for tick in range(4):
        send_iteration(client, 1, tick, NUM_RECORDS)
    fill(memory, 0, 0, layouts, 10)
    fill(memory, 1, 1, layouts[:2], 11)
    fill(memory, 2, 2, layouts, 12)
    fill(memory, 3, 3, layouts, 13)
    memory.clear(3)  # its place was given away
    assert client.send(*messages.facts_end(1))
    send_payload(client, 1, 2, NUM_RECORDS)
    assert client.send(*messages.end(1))
    done, _ = wait_for(client, "incident_done")
    assert not done.header["error"] and done.header["num_written"] == NUM_RECORDS + 2 + NUM_RECORDS
    with flightrec.open(done.header["path"]) as incident:
        for number, entry in enumerate(incident.iterations):
            found = incident.records(iteration=entry.iteration)
            raw = [record.high_precision for record in found]
            there = [values is not None for values in raw]
            assert there == {0: [True] * 4, 1: [True, True, False, False], 2: [True] * 4, 3: [False] * 4}[number]
            pattern = np.full(1, (10 + number) * 0x0101, "u4")  # of a bfloat16 made of two such bytes
            (value,) = (pattern << 16).view("f4")
            same = [bool((values == value).all()) for values in raw if values is not None]
            assert all(same) if number < 2 else not any(same)  # the third came through the staging memory
        blind = {(row.iteration, row.layer) for row in incident.blind}
        assert (incident.iterations[3].iteration, "") in blind
    assert client.close(30)
    memory.close()
