from __future__ import annotations

from pathlib import Path

from storage_samples import firing, plain, write_incident

from flightrec.analysis.incident import Incident, open_incident
from flightrec.records import Key


def test_the_incident_that_users_open_answers_blame(tmp_path: Path) -> None:
    key = Key("fc", "output", microbatch=0)
    write_incident(tmp_path, {5: [plain(key, [float("nan")], nan_count=1)]}, [firing(key, 5)])
    with open_incident(tmp_path) as incident:
        assert isinstance(incident, Incident)
        (finding,) = incident.blame()
        assert finding.key == key
        assert len(incident.records(layer="f*")) == 1
