"""The files of docs/deploy, as far as they can be read here; and the links of the how-to pages."""

import plistlib
import re
import shutil
import subprocess
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"


def test_the_property_list_is_one() -> None:
    """And runs the command that there is."""
    value = plistlib.loads((DOCS / "deploy/io.headrace.plist").read_bytes())
    assert value["ProgramArguments"][1] == "serve"
    assert value["ExitTimeOut"] > 30, "the default drain timeout"


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd-analyze is not here")
def test_systemd_has_nothing_to_say_of_the_unit(tmp_path: Path) -> None:
    """With a program and a user that are here."""
    unit = (DOCS / "deploy/headrace.service").read_text()
    unit = unit.replace("/opt/headrace/bin/headrace", "/bin/true").replace("User=headrace", "User=root")
    path = tmp_path / "headrace.service"
    path.write_text(unit)
    result = subprocess.run(["systemd-analyze", "verify", str(path)], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize("page", sorted(DOCS.glob("howto/*.md")), ids=lambda page: page.stem)
def test_how_to_pages_link_to_what_is_there(page: Path) -> None:
    """Relative links; and each page says what was tried."""
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (page.parent / target).exists(), target
    assert "**Tried**" in text
