"""What the site makes of a lesson's text and of what its cells print."""

from types import SimpleNamespace

from tools import pages


def test_a_number_stays_on_one_line_with_its_unit_and_with_the_next_number():
    page = SimpleNamespace(file=SimpleNamespace(src_uri="lessons/one.md"))
    words = (
        "<p>14\n% of 3 GiB, 12.2 GB/s, 2 x 4 × 1, 5 songs, <code>4 GiB</code></p><pre>5 <b>s</b> 6 s</pre><td>7 %</td>"
        "<svg><style>1 s</style>2 s</svg> \\(4 x 2\\) 3 s"
    )
    shown = pages.on_page_content(words, page, None, None)
    assert shown == (
        "<p>14\xa0% of 3\xa0GiB, 12.2\xa0GB/s, 2\xa0x\xa04\xa0×\xa01, 5 songs, <code>4 GiB</code></p>"
        '<pre>5 <b>s</b> 6 s</pre><td class="unit">7\xa0%</td>'
        "<svg><style>1 s</style>2 s</svg> \\(4 x 2\\) 3\xa0s"
    )


def test_what_is_printed_is_broken_into_lines_but_neither_a_comment_of_code_nor_columns():
    words, comment, columns = "word " * 20, "# " + "word " * 20, "name  5  " + "word " * 20
    assert pages._narrow(words).splitlines() == [("word " * 17).strip(), "    word word word"]
    code = "with context_parallel(mesh, buffers=row):  " + comment
    assert pages._narrow(f"{comment}\n{columns}\n{code}").splitlines() == [comment, columns, code]
