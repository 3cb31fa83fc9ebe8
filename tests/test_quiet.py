"""What the libraries warn of is one plain line, or nothing."""

import subprocess
import sys
import warnings

import pytest

from cria_tricks.load import quiet

PEFT = "/somewhere/site-packages/peft/config.py"


def warned(text: str, category: type[Warning] = UserWarning, filename: str = PEFT) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        quiet.drop()
        quiet.plain()
        warnings.warn_explicit(text, category, filename, 12)


def test_a_warning_is_one_line_by_its_librarys_name(capsys):
    warned("Unexpected keyword\narguments ['x'] for class LoraConfig,\n  these are ignored.")
    assert capsys.readouterr().err == (
        "warning: peft: Unexpected keyword arguments ['x'] for class LoraConfig, these are ignored.\n"
    )
    warned("no code, no path", filename="/home/me/script.py")
    assert capsys.readouterr().err == "warning: no code, no path\n"


def test_a_warning_hides_a_token(capsys):
    warned("sent hf_" + "a" * 30)
    assert capsys.readouterr().err == "warning: peft: sent [hidden]\n"


@pytest.mark.parametrize(
    ("text", "category"),
    [
        ("fan_in_fan_out is set to False but the target module is `Conv1D`. Setting it to True.", UserWarning),
        ("Already unmerged. Nothing to do.", UserWarning),
        ("Merge lora module to 4-bit linear may get different generations due to rounding errors.", UserWarning),
        ("this will change in version 9", FutureWarning),
    ],
)
def test_a_warning_that_nobody_can_act_on_is_dropped(text, category, capsys):
    warned(text, category)
    assert capsys.readouterr().err == ""


def test_one_process_of_several_says_it(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    warned("the card is slow")
    assert capsys.readouterr().err == ""


def test_the_command_line_says_warnings_so():
    code = (
        "import sys, typer, warnings; from cria_tricks.cli import main as cli\n"
        "cli.app.command('warn')(lambda: warnings.warn_explicit('a\\nb', UserWarning, '/site-packages/peft/x.py', 1))\n"
        "sys.argv = ['cria', 'warn']; cli.main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stderr) == (0, "warning: peft: a b\n")
