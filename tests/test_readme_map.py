"""The tool that writes the map of train_gpt2.py into README.md."""

import pytest
import readme_map


def test_the_map_is_written_between_its_markers(tmp_path, monkeypatch):
    monkeypatch.setattr(readme_map, "README", tmp_path / "README.md")
    monkeypatch.setattr(readme_map, "SCRIPT", tmp_path / "script.py")
    readme_map.SCRIPT.write_text("# ---- One: \\1 ---\nx = 1\n\n\n# ---- Two\ny = 2\n")
    other = "<!-- python x -->\n<!-- end -->\n"
    readme_map.README.write_text(f"Text.\n<!-- map -->\nold\n<!-- end -->\nMore.\n{other}")
    assert not readme_map.readme_is_true()
    readme_map.main([])
    assert readme_map.readme_is_true()
    rows = "| lines | section |\n|---|---|\n| 1-2 | One: \\1 |\n| 5-6 | Two |\n"
    shown = f"Text.\n<!-- map -->\n{rows}<!-- end -->\nMore.\n{other}"
    assert readme_map.README.read_text() == shown


def test_a_readme_without_the_markers_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(readme_map, "README", tmp_path / "README.md")
    readme_map.README.write_text("Text.\n")
    with pytest.raises(ValueError, match=r"README.md has 0 places for the map, but it needs"):
        readme_map.main([])
    assert readme_map.README.read_text() == "Text.\n"
