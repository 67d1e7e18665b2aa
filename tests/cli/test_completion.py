"""Shell completion: what bash offers after a part of a command line."""

import subprocess
import sys

import pytest

from oneshot.cli.completion import COMPLETED, SHELLS, script
from oneshot.cli.main import COMMANDS, main

OFFER = 'COMPREPLY=(); _shtab_oneshot 2>/dev/null; echo "${COMPREPLY[@]}"\n'


def test_every_other_command_is_completed() -> None:
    assert [*COMPLETED, "completion"] == list(COMMANDS)


def test_bash_offers_commands_options_and_words() -> None:
    typed = {
        "ev": {"evaluate"},
        "compress model --max-m": {"--max-memory"},
        "compress model --form per": {"per-layer"},
        "profile model --dtype b": {"bfloat16"},
        "compress model --seed ": set(),
    }
    lines = [script("bash")]
    for text in typed:
        words = ["oneshot", *text.split(" ")]
        lines.append(
            f"COMP_WORDS=({' '.join(word or repr('') for word in words)}); COMP_CWORD={len(words) - 1}; {OFFER}"
        )
    done = subprocess.run(["bash", "-c", "\n".join(lines)], capture_output=True, text=True, check=True)
    offered = [set(line.split()) for line in done.stdout.splitlines()]
    assert offered == list(typed.values())


@pytest.mark.parametrize("shell", SHELLS)
def test_every_shell_has_a_script(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    assert "oneshot" in capsys.readouterr().out


def test_a_missing_library_is_one_sentence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "bash"]) == 1
    assert capsys.readouterr().err == "error: Completion needs shtab: pip install 'oneshot-llm[completion]'.\n"
