"""Help, version and shell completion: what they say, and how little they import."""

import json
import re
import shutil
import subprocess
import sys
from dataclasses import fields
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import pytest

from adloco.cli.main import COMMANDS, build_parser, main
from adloco.cli.settings_help import COMMON, settings_help
from adloco.config.finding import aliases, setting_facts, switches
from adloco.config.recipe import build_recipe, override, read_values
from adloco.config.recipe_text import Setting, known_settings, named_settings
from adloco.config.sections import BATCH_RULES, SECTIONS
from adloco.config.setting_words import take_settings
from adloco.config.shipped import shipped_recipes
from adloco.config.values import takes_truths
from adloco.discovery import lab_classes
from tests.pages import DESCRIBES_LAB

NAMES = ["train", "compare", "sweep", "ablate", "plan", "runs", "recipes", "prepare", "probe"]
NAMES += ["config", "evaluate", "generate", "export", "report", "rewind", "launch"]
NAMES += ["doctor", "completion", *lab_classes("command")]


def printed(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(words) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return str(out)


HELP, SETTINGS = 280, 500
"""Modules that a command may import, Python's own among them, where the help takes 227,
`--version` 264, `adloco config` 424 and `adloco completion` 472. torch alone takes 1400.
"""


@pytest.mark.parametrize(
    ("line", "most"),
    [
        *((line, HELP) for line in ("--help", "--version", "compare --help", "trian")),
        *((line, SETTINGS) for line in ("config", "config --search wire.", "completion bash")),
        *((line, SETTINGS) for line in ("runs .", "train --x", "train nothing", "train --help")),
        ("recipes", HELP),
    ],
)
def test_few_modules_are_imported_where_nothing_is_computed(
    line: str, most: int, tmp_path: Path
) -> None:
    code = (
        "import json, sys; from adloco.__main__ import main; main(); "
        "print('\\n' + json.dumps(list(sys.modules)))"
    )
    words = [sys.executable, "-c", code, *line.split()]
    done = subprocess.run(words, capture_output=True, text=True, check=True, cwd=tmp_path)
    imported = json.loads(done.stdout.splitlines()[-1])
    assert len(imported) <= most
    assert not {"torch", "transformers", "numpy", "matplotlib", "plotly"} & {*imported}


def test_a_line_is_refused_before_torch_is_imported(tmp_path: Path) -> None:
    lines = [
        "compare dilocoo ddp",
        "compare diloco ddp --seeds 0",
        "compare diloco ddp --targets -1",
        "compare diloco ddp --inner.lrr 1",
        "ablate dilocoo",
        "sweep dilocoo --inner.lr 1 2",
        "probe dilocoo",
        *("evaluate nothing", "generate nothing --prompt a", "export nothing --to x"),
        "report nothing",
    ]
    code = (
        "import sys; from adloco.cli.main import main; "
        "print([line for line in sys.argv[1:] "
        "if main(line.split()) != 2 or 'torch' in sys.modules])"
    )
    words = [sys.executable, "-c", code, *lines]
    done = subprocess.run(words, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout == "[]\n"
    assert len(done.stderr.splitlines()) == len(lines)
    assert not any(tmp_path.iterdir())


@pytest.mark.nightly
def test_a_report_is_drawn_without_torch_and_matplotlib() -> None:
    code = (
        "import sys, adloco.report.page; "
        "print(sorted({'torch', 'transformers', 'matplotlib'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("loaded", [False, True])
def test_the_last_collection_is_skipped_unless_triton_is_loaded(loaded: bool) -> None:
    code = (
        "import atexit, gc, sys; from adloco.__main__ import main; "
        "before = gc.get_freeze_count(); "  # Python 3.12 freezes objects at its own start.
        "atexit.register(lambda: print(gc.get_freeze_count() > before)); "
        f"sys.modules |= {{'triton': sys}} if {loaded} else {{}}; main()"
    )
    words = [sys.executable, "-c", code, "config"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == str(not loaded)


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_a_command_says_nothing_of_triton() -> None:
    code = "import triton; from adloco.__main__ import main; main()"
    done = subprocess.run([sys.executable, "-c", code, "config"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_an_interruption_of_an_import_shows_no_traceback() -> None:
    code = """
import sys

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == "rich":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupting())
from adloco.__main__ import main
sys.exit(main())
"""
    done = subprocess.run([sys.executable, "-c", code, "config"], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "adloco: interrupted\n")


def test_the_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(["--help"], capsys)
    assert re.findall(r"^    (\w+)  +\w", text, re.MULTILINE) == NAMES
    assert len(COMMANDS) == len(NAMES)
    assert printed(["--version"], capsys) == f"adloco {metadata.version('adloco')}\n"


def test_recipes_are_listed_with_what_they_are_for(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(["recipes"], capsys).splitlines()
    assert [line.split()[0] for line in lines] == shipped_recipes()
    for line in lines:
        assert re.fullmatch(r"\S+ +[A-Z].{20,}\.", line) and len(line) <= 80


def test_a_closed_output_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in `adloco recipes >&-`, for which Python has no stdout."""
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["recipes"]) == 0


def test_config_marks_what_differs_from_the_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(["config", "ddp", "--inner.lr", "0.5"], capsys).splitlines()
    assert 'name = "ddp"  # default: ""' in lines
    assert "lr = 0.5  # default: 0.008" in lines
    assert 'optimizer = "muon"' in lines


def test_comparisons_have_three_seeds_and_a_search_has_one() -> None:
    _, commands = build_parser()
    seeds = {name: commands.choices[name].get_default("seeds") for name in NAMES}
    assert {name: number for name, number in seeds.items() if number} == {
        "compare": 3,
        "ablate": 3,
        "sweep": 1,
    }


@pytest.mark.parametrize("words", [[], *([name] for name in NAMES)], ids=" ".join)
def test_help_fits_80_columns(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = printed([*words, "--help"], capsys)
    assert text.startswith(" ".join(["usage: adloco", *words]))
    assert max(map(len, text.splitlines())) <= 80
    if words[:1] in ([name] for name in NAMES[:4]):
        assert "--section.key VALUE" in text


def test_the_help_of_train_lists_settings_by_section(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each setting of the default recipe stands there once, those used often first."""
    monkeypatch.setenv("COLUMNS", "80")
    text = printed(["train", "--help"], capsys)
    listed = re.findall(r"^  --(\w+\.\w+) ", text, re.MULTILINE)
    recipe = build_recipe(read_values("adloco"))
    assert listed[: len(COMMON)] == list(COMMON)
    assert sorted(listed) == sorted(named_settings(recipe))
    assert re.findall(r"^\[(\w+)\]$", text, re.MULTILINE) == list(SECTIONS)
    assert f"[{recipe.run.tokens}]" in text


def known() -> dict[str, Setting]:
    """The settings by name; of one that choices explain differently, the recipe's own."""
    named: dict[str, Setting] = {}
    for setting in known_settings(build_recipe(read_values("adloco"))):
        named.setdefault(setting.name, setting)
    return named


def test_every_setting_of_every_recipe_is_known() -> None:
    """Help knows the settings of each class that a section can have, and of each shipped recipe."""
    there = set(known())
    for section, content in SECTIONS.items():
        classes = [*content.parts.values()]
        classes += content.choice.register.classes.values() if content.choice else []
        for owner in classes:
            assert {f"{section}.{field.name}" for field in fields(owner)} <= there
    for recipe in shipped_recipes():
        assert set(named_settings(build_recipe(read_values(recipe)))) <= there


@DESCRIBES_LAB
@pytest.mark.parametrize("recipe", ["adloco", "diloco"])
def test_help_on_settings(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each setting stands under its section, with its value in the recipe."""
    monkeypatch.setenv("COLUMNS", "80")
    built = build_recipe(override(read_values(recipe), [("run.tokens", "5")]))
    text = settings_help(known_settings(built))
    assert max(map(len, text.splitlines())) <= 80
    assert re.findall(r"^\[(\w+)\]:$", text, re.MULTILINE) == list(SECTIONS)
    flags = re.findall(r"^  --(\S+)", text, re.MULTILINE)
    assert sorted(flags) == sorted(known())
    batch = text[text.index("\n[batch]:") : text.index("\n[test]:")]
    assert f"One of {', '.join(BATCH_RULES.classes)}. (default" in " ".join(batch.split()).replace(
        "- ", "-"
    )
    plain = " ".join(text.split())
    assert "one of the next three must then be given. (default: 5)" in plain
    assert "With batch.rule ramp: Requested batch at the start" in plain
    assert "With batch.rule warmup: Requested batch of each stage" in plain
    assert "(must be given)" in plain
    assert "With wire.format int8: Values that share a scale, which takes 4 bytes; at" in plain
    assert ("With batch.rule norm-test" in plain) == (recipe == "diloco")


@pytest.mark.parametrize(
    ("text", "names", "number"),
    [
        ("lr", ["inner.lr", "outer.lr"], 2),
        ("H", ["method.sync_every"], 150),
        ("dropout", ["run.seed"], 2),
        ("batch-size", ["batch.initial"], 1),
    ],
)
def test_a_search(
    text: str, names: list[str], number: int, capsys: pytest.CaptureFixture[str]
) -> None:
    found = re.findall(r"^  --(\S+)", printed(["config", "--search", text], capsys), re.MULTILINE)
    assert {*names} <= {*found} and len(found) <= number


def test_a_search_without_result(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--search", "momentun"]) == 2
    assert "(did you mean --search inner.momentum or" in capsys.readouterr().err


def test_switches_are_the_settings_that_are_true_or_false() -> None:
    assert switches() == {name for name, setting in known().items() if takes_truths(setting.hint)}


def test_other_names_stand_for_settings() -> None:
    assert {*aliases().values()} <= {*setting_facts()} == {*known()}


def test_help_on_a_section(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(["config", "--search", "wire."], capsys)
    sections = {flag.partition(".")[0] for flag in re.findall(r"^  --(\S+)", text, re.MULTILINE)}
    assert sections == {"wire"}


@pytest.mark.parametrize(
    ("words", "settings", "others"),
    [
        (["x", "--a.b", "1", "y", "--c.d=2=3"], [("a.b", "1"), ("c.d", "2=3")], "x y"),
        (["--a.b=--c.d", "x"], [("a.b", "--c.d")], "x"),
        (["--a.b="], [("a.b", "")], ""),
        (["--run.compile", "x"], [("run.compile", "true")], "x"),
        (
            ["--batch.grow_only", "--run.compile"],
            [("batch.grow_only", "true"), ("run.compile", "true")],
            "",
        ),
        (["x", "--run.compile", "no", "y"], [("run.compile", "no")], "x y"),
        (["--run.compile", "auto", "y"], [("run.compile", "auto")], "y"),
        (["--resume=runs/1.5", "./a.toml", "-1.5"], [], "--resume=runs/1.5 ./a.toml -1.5"),
    ],
)
def test_settings_are_taken_from_a_line(
    words: list[str], settings: list[tuple[str, str]], others: str
) -> None:
    assert take_settings(words) == (settings, others.split())


def test_settings_may_stand_anywhere(capsys: pytest.CaptureFixture[str]) -> None:
    lines = [
        ["config", "diloco", "--run.seed", "7", "--outer.update=mean"],
        ["config", "--outer.update", "mean", "--run.seed=7", "diloco"],
    ]
    first, second = (printed(words, capsys) for words in lines)
    assert first == second
    assert "seed = 7  # default: 0\n" in first and 'update = "mean"  # default' in first


def test_a_prompt_may_look_like_a_setting() -> None:
    parser, _ = build_parser()
    words = ["generate", "RUN", "--prompt", "--x.y is a flag"]
    assert parser.parse_args(words).prompt == "--x.y is a flag"


COMPLETE = """
source {script}
{emulate}
COMP_WORDS=({words})
COMP_CWORD={position}
_adloco
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.fixture(scope="module", params=["bash", "zsh", "fish"])
def shell(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A shell, and a script that completes in it."""
    if shutil.which(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    script = tmp_path_factory.mktemp("completion") / "script"
    words = [sys.executable, "-m", "adloco", "completion", request.param]
    script.write_text(subprocess.run(words, capture_output=True, text=True, check=True).stdout)
    return [request.param, str(script)]


def complete(shell: list[str], words: list[str]) -> list[str]:
    """Completions that the shell offers for the last word."""
    if shell[0] == "fish":
        line = " ".join(words).replace(" = ", "=")
        code = f"source {shell[1]}; complete -C '{line}'"
        done = subprocess.run(
            ["fish", "-c", code], capture_output=True, text=True, cwd=Path(shell[1]).parent
        )
        assert done.returncode == 0 and done.stderr == ""
        return [word.rpartition("=")[2] for word in done.stdout.split()]
    quoted = " ".join(f"'{word}'" for word in words)
    name, script = shell
    # zsh calls completions of bash like this.
    emulate = "emulate sh; setopt kshglob noshglob braceexpand" if name == "zsh" else ""
    code = COMPLETE.format(script=script, emulate=emulate, words=quoted, position=len(words) - 1)
    done = subprocess.run([name, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stderr == ""
    # zsh offers those of the words that begin as the last one does.
    return [word for word in done.stdout.split() if name == "bash" or word.startswith(words[-1])]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("adloco tr", ["train"]),
        ("adloco e", ["evaluate", "export"]),
        ("adloco --v", ["--version"]),
        ("adloco train dil", ["diloco", "diloco-paper"]),
        ("adloco train --res", ["--restart", "--resume"]),
        ("adloco train --wire.fo", ["--wire.format"]),
        ("adloco train diloco --wire.format int", ["int1", "int2", "int4", "int8"]),
        ("adloco train --batch.rule = w", ["warmup"]),
        ("adloco train --run.precision auto single --run.compile ", ["auto", "true", "false"]),
        ("adloco generate --te", ["--temperature"]),
        ("adloco launch diloco --on s", ["skypilot", "slurm"]),
        ("adloco generate --run.s", []),
        ("adloco train --resume ru", []),  # The shell completes files.
        ("adloco completion ", ["bash", "zsh", "fish"]),
    ],
)
def test_completion(shell: list[str], words: str, expected: list[str]) -> None:
    assert sorted(complete(shell, words.split(" "))) == sorted(expected)


def test_the_shell_calls_it_for_adloco(shell: list[str], tmp_path: Path) -> None:
    name, script = shell
    if name == "bash":
        done = subprocess.run(
            ["bash", "-c", f"source {script}; complete -p adloco"], capture_output=True, text=True
        )
        assert done.stdout == "complete -o default -F _adloco adloco\n"
    elif name == "zsh":
        # compinit keeps a list of functions in the home folder.
        done = subprocess.run(
            ["zsh", "-c", f"source {script}; print -r -- $_comps[adloco]"],
            capture_output=True,
            text=True,
            env={"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"},
        )
        assert "_adloco" in done.stdout
