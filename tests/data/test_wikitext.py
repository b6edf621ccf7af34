"""Wikitext comes out as text that reads well. The real articles are cleaned in test_sources_sample.py."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinylm.data.wikitext import clean
from tinylm.data.wikitext_residue import HEADING

_MARKUP = (
    "{{ }} [[ ]] {| |} | |- <ref> </ref> <math> </math> <code> </code> '' <!-- --> &#x &#xD800; ; : [ ] { } < ( ) ,"
)
_PIECES = st.sampled_from(
    [
        *_MARKUP.split(),
        *("<ref name=a />", "[http://a ", "\n", "\n* ", "\n== ", " ==\n", "\0", HEADING, " "),
        *("0", "é", "word", "File:", "thumb", "lang", "convert"),
    ]
)


@given(st.lists(_PIECES, max_size=30).map("".join))
@settings(max_examples=300, deadline=None)
def test_no_markup_is_left_of_any_string(wikitext: str) -> None:
    text = clean(wikitext)
    assert not [token for token in ("{{", "}}", "[[", "]]", "<ref", "\0", HEADING) if token in text]
    text.encode()


@pytest.mark.parametrize(
    ("wikitext", "text"),
    [
        (
            "'''Aa''' is a [[river (water)|river]] in [[France]].<ref>{{cite book|title=X}}</ref>",
            "Aa is a river in France.",
        ),
        ("A<ref name=a /> b<ref name=b>c</ref> d<!-- e --> f.", "A b d f."),
        ("Open <ref>one, then <ref>two</ref> end", "Open one, then end"),
        ("[[File:A.jpg|thumb|200px|A [[link]] in ''it''.]]Text[[Category:B]][[de:C]]", "Text"),
        ("See [[:Category:Rivers]] and [[Halo 5: Guardians]].", "See Category:Rivers and Halo 5: Guardians."),
        ("Text\n<gallery>\nA.jpg|caption\n</gallery>", "Text"),
        ("[http://a.org A site] and [http://b.org].", "A site and."),
        ("a {{lang|fr|mot}}, {{convert|3|to|5|km|mi}} long, at {{convert|-2|C}}", "a mot, 3 to 5 km long, at -2 C"),
        ("Rand ({{IPAc-en|a}}; born {{birth date|1905|2|2}}) wrote.", "Rand (born) wrote."),
        ("Aa ({{IPA|x}}, {{lang-sq|}}) is", "Aa is"),
        (
            "10<sup>3</sup> m<sup>2</sup>, the 1<sup>st</sup>, <sup>14</sup>C, H<sub>2</sub>O",
            "10^3 m^2, the 1st, 14C, H2O",
        ),
        ("a&nbsp;b &ndash; c &lt;d&gt;", "a b \N{EN DASH} c <d>"),
        (
            "* one\n* {{cite web|url=x}}\n** two\n# three\n:four\n; term : meaning",
            "- one\n- two\n- three\nfour\nterm: meaning",
        ),
        ("<math>x_{{n}} = [[a]]</math> and <code>a[b[0]] {{</code>", "x_{ {n} } = [ [a] ] and a[b[0] ] { {"),
        ("a {{ b", "a b"),
        ("{(){ b", "b"),
        ("__NOTOC__a", "a"),
    ],
)
def test_markup_becomes_what_a_reader_sees(wikitext: str, text: str) -> None:
    assert clean(wikitext) == text


def test_tables_go_with_what_is_nested_in_them_and_an_open_one_takes_no_prose() -> None:
    assert clean("a\n{| class=x\n! h\n|-\n| b\n{|\n| c\n|}\n| d\n|}\ne") == "a\n\ne"
    assert "prose that follows" in clean("a\n{| class=x\n| b\n\nprose that follows")


def test_headings_are_paragraphs_and_empty_sections_go() -> None:
    wikitext = (
        "Lead.\n== History ==\n=== Early ===\nText.\n=== Late ===\n== Notes ==\n{{reflist}}\n== Links ==\n* {{x}}\n"
    )
    assert clean(wikitext) == "Lead.\n\nHistory\n\nEarly\n\nText."


def test_code_keeps_its_lines_and_indentation() -> None:
    assert (
        clean("Text:\n<syntaxhighlight lang=c>\nif (a)\n    b();\n</syntaxhighlight>\nend")
        == "Text:\nif (a)\n    b();\nend"
    )
