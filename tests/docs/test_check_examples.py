"""tools/check_examples.py finds wrong types in pages and programs, and names their lines."""

from __future__ import annotations

from pathlib import Path

from check_examples import errors_of, module_of

PAGE = """# A page

```python
import slm_core as slm

model = slm.load("model.gguf", n_threads=2)
```

```text
not Python
```

```python
answer = model.generate("Hello!")
print(answer.text.nothing)
```
"""


def test_blocks_keep_their_lines() -> None:
    lines = module_of(PAGE).splitlines()
    assert {i: line for i, line in enumerate(lines, 1) if line} == {
        4: "import slm_core as slm",
        6: 'model = slm.load("model.gguf", n_threads=2)',
        14: 'answer = model.generate("Hello!")',
        15: "print(answer.text.nothing)",
    }
    assert module_of("no code\n") == ""


def test_both_checkers_find_a_wrong_type(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "examples").mkdir()
    (tmp_path / "README.md").write_text(PAGE)
    (tmp_path / "docs" / "sound-page.md").write_text(
        "```python\nimport slm_core as slm\n\nprint(slm.backends())\n```\n"
    )
    (tmp_path / "examples" / "program.py").write_text("def double(x: int) -> int:\n    return 2 * x\n\n\ndouble('2')\n")
    by_page = sorted((line.split(":")[0], line.split(":")[1]) for line in errors_of(tmp_path))
    assert by_page == [("README.md", "15")] * 2 + [("examples/program.py", "5")] * 2
