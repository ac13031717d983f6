"""From messages to incidents: which message means what for which incident.

One ``Assembler`` a writer. It owns the run's layouts and the open incidents; an error in one incident is answered with
``error`` and concerns no other. Runs in the writer.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import threading
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from flightrec.records import RecordLayout
from flightrec.storage.facts import Blind
from flightrec.writer import folders, launch
from flightrec.writer.from_host import write_missing
from flightrec.writer.history import HistoryMemory
from flightrec.writer.host_memory import HostMemory
from flightrec.writer.incident import NEVER_ARRIVED, Incident, Payload, RunFacts
from flightrec.writer.shared import Message

logger = logging.getLogger("flightrec.writer")

TRAINER_DIED = "trainer died"
SALVAGE_LIMIT_S = 60.0


class Assembler:
    """Handles every message but ``stop``.

    Args:
        staging: the staging arena.
        tell: sends an answer (kind, header) to the trainer.
        history: statistics of past iterations, if the trainer keeps any.
        host: the host tier, if there is one.
    """

    def __init__(
        self,
        staging: memoryview,
        tell: Callable[[str, dict[str, Any]], None],
        history: HistoryMemory | None = None,
        host: HostMemory | None = None,
    ) -> None:
        self._staging = staging
        self._history = history
        self._host = host
        self._tell = tell
        self._run = RunFacts(Path(), {})
        self._incidents: dict[int, Incident] = {}
        self._salvaged: list[str] | None = None
        self._handlers: dict[str, Callable[[Message], None]] = {
            "start": self._start,
            "config": self._config,
            "layouts": self._layouts,
            "quantizers": self._quantizers,
            "open": self._open,
            "iteration": self._iteration,
            "facts_end": self._facts_end,
            "payload": self._payload,
            "firing": self._firing,
            "end": self._end,
            "discard": self._discard,
        }

    def handle(self, message: Message) -> None:
        """Do what a message asks for; never raises."""
        handler = self._handlers.get(message.kind)
        if handler is None:
            self._error(-1, message.kind, f"unknown message {message.kind!r}")
            return
        try:
            handler(message)
        except Exception as error:
            self._failed(message, error)

    def tell_salvaged(self) -> None:
        """Answer ``salvaged`` once the left-overs were looked at."""
        if self._salvaged is not None:
            self._tell("salvaged", {"paths": self._salvaged})
            self._salvaged = None

    def finish(self, ended: str = "") -> None:
        """Commit every open incident with what there is; never raises.

        Args:
            ended: why now; empty when the trainer is gone.
        """
        for incident in list(self._incidents.values()):
            self._finish_early(incident, ended or TRAINER_DIED)

    def _finish_early(self, incident: Incident, reason: str) -> None:
        try:
            if not incident.facts_committed:
                self._commit_facts(incident, reason)
            if incident.number in self._incidents:
                self._finish(incident, reason)
        except Exception as error:
            self._drop(incident.number, "finish", error)

    def _start(self, message: Message) -> None:
        header = message.header
        directory = Path(header["directory"])
        self._run = RunFacts(directory, header["identity"], header["disk_quota_bytes"])
        if any(True for _ in folders.abandoned(directory)):
            with contextlib.suppress(RuntimeError):  # the interpreter is ending: the next run looks at them
                threading.Thread(target=self._salvage, args=[directory], name="flightrec-salvage", daemon=True).start()

    def _salvage(self, directory: Path) -> None:
        # In a process of its own: a damaged file may crash the HDF5 library.
        try:
            done = subprocess.run(
                launch.command("flightrec.writer.salvage", str(directory)),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                env=launch.environment(),
                cwd="/",
                timeout=SALVAGE_LIMIT_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            logger.exception("left-overs in %s could not be looked at", directory)
            return
        self._salvaged = os.fsdecode(done.stdout).splitlines()

    def _config(self, message: Message) -> None:
        self._run.config_text = message.header["text"]
        self._run.environment = message.header["environment"]
        self._run.surroundings.ask(self._run.environment)

    def _layouts(self, message: Message) -> None:
        for data in message.header["layouts"]:
            layout = RecordLayout.from_json(data)
            self._run.layouts[layout.layout_id] = layout

    def _quantizers(self, message: Message) -> None:
        for number, data in enumerate(message.header["quantizers"], message.header["start_id"]):
            self._run.quantizers[number] = data

    def _open(self, message: Message) -> None:
        incident = Incident(message, self._run, self._history)
        self._incidents[incident.number] = incident

    def _iteration(self, message: Message) -> None:
        if incident := self._find(message):
            incident.add_iteration(message)

    def _facts_end(self, message: Message) -> None:
        if incident := self._find(message):
            incident.trigger_json = message.header["trigger"] or incident.trigger_json
            incident.firings_json += message.header["firings"]
            incident.blind += [Blind(*row) for row in message.header["blind"]]
            self._commit_facts(incident)

    def _payload(self, message: Message) -> None:
        header = message.header
        payload = Payload(header["tick"], [(s, a, o, n) for s, a, o, n in header["pieces"]], header["last"])
        incident = self._incidents.get(header["incident"])
        if incident is not None and not incident.facts_committed:
            incident.waiting.append(payload)
            return
        try:
            if incident is not None:
                incident.write_payload(payload, self._staging)
        finally:
            self._free(header["incident"], payload)
        if incident is not None and incident.error:
            self._finish(incident)

    def _firing(self, message: Message) -> None:
        if incident := self._find(message):
            firings = incident.late_firings if incident.facts_committed else incident.firings_json
            firings += message.header["firings"]

    def _end(self, message: Message) -> None:
        if incident := self._find(message):
            if not incident.facts_committed:
                self._commit_facts(incident)
            incident.blind += [Blind(*row) for row in message.header["blind"]]
            if incident.number in self._incidents:
                self._finish(incident)

    def _discard(self, message: Message) -> None:
        incident = self._incidents.pop(message.header["incident"], None)
        if incident is not None:
            self._free(incident.number, *incident.waiting)
            incident.abandon()
            self._tell("discarded", {"incident": incident.number})

    def _find(self, message: Message) -> Incident | None:
        """The open incident; one that failed or was discarded was told, its later messages are dropped."""
        return self._incidents.get(message.header["incident"])

    def _commit_facts(self, incident: Incident, ended: str = "") -> None:
        incident.write_facts(ended)
        assert incident.folder is not None
        answer = {"incident": incident.number, "incident_id": incident.folder.name, "path": str(incident.folder)}
        self._tell("facts_committed", answer)
        waiting, incident.waiting = incident.waiting, []
        for payload in waiting:
            incident.write_payload(payload, self._staging)
        self._free(incident.number, *waiting)
        if incident.error:
            self._finish(incident)

    def _finish(self, incident: Incident, reason: str = NEVER_ARRIVED) -> None:
        """Commit and forget it; with an error that is told first (facts and index stand, the tensors do not)."""
        if self._host is not None:
            write_missing(incident, self._host)
        answer = incident.finish(reason)
        self._incidents.pop(incident.number, None)
        if incident.error:
            self._error(incident.number, "tensors", incident.error)
        self._tell("incident_done", answer)

    def _free(self, number: int, *payloads: Payload) -> None:
        for payload in payloads:
            offsets = [offset for _, _, offset, _ in payload.pieces]
            self._tell("free", {"incident": number, "tick": payload.tick, "offsets": offsets})

    def _failed(self, message: Message, error: Exception) -> None:
        number = message.header.get("incident", -1)
        if number in self._incidents:
            self._drop(number, message.kind, error)
        else:
            self._error(number, message.kind, f"{type(error).__name__}: {error}", error)

    def _drop(self, number: int, stage: str, error: Exception) -> None:
        incident = self._incidents.pop(number)
        self._free(number, *incident.waiting)
        with contextlib.suppress(OSError):
            incident.abandon()
        self._error(number, stage, f"{type(error).__name__}: {error}", error)

    def _error(self, number: int, stage: str, text: str, error: Exception | None = None) -> None:
        where: Sequence[str] = traceback.format_exception(error) if error is not None else ()
        logger.error("incident %s, %s: %s\n%s", number, stage, text, "".join(where))
        self._tell("error", {"incident": number, "stage": stage, "message": text})
