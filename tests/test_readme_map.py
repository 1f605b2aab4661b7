"""The tool that writes the map of train_gpt2.py into README.md."""

from readme_map import file_map


def test_the_map_lists_the_lines_of_each_section():
    rows = "| lines | section |\n| --- | --- |\n| 1-2 | One: x |\n| 5-6 | Two |"
    assert file_map("# ---- One: x ---\nx = 1\n\n\n# ---- Two\ny = 2\n") == rows
