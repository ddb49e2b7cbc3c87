#!/usr/bin/env python3
"""Draws text as a terminal window in SVG: tessera demo 2>&1 | scripts/terminal_picture.py "make demo" > docs/demo.svg"""
import html
import sys

FONT, LINE, CHARACTER, MARGIN = 13, 17, 7.83, 16


def visible_lines(text, columns=118):
    """What a terminal shows: a carriage return starts the line again, long lines wrap."""
    for line in text.split("\n"):
        line = line.split("\r")[-1].expandtabs()
        while len(line) > columns:
            yield line[:columns]
            line = line[columns:]
        yield line


def main():
    title = sys.argv[1] if len(sys.argv) > 1 else ""
    lines = list(visible_lines(sys.stdin.read().rstrip("\n")))
    width = MARGIN * 2 + CHARACTER * max(map(len, lines))
    height = MARGIN * 2 + LINE * (len(lines) + 1)
    print(f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" role="img">')
    print(f"<title>{html.escape(title)}</title>")
    print('<rect width="100%" height="100%" rx="8" fill="#1c2128"/>')
    print(f'<g font-family="ui-monospace, Menlo, Consolas, monospace" font-size="{FONT}" fill="#d0d7de" xml:space="preserve">')
    print(f'<text x="{MARGIN}" y="{MARGIN + FONT}" fill="#7ee787">$ {html.escape(title)}</text>')
    for number, line in enumerate(lines, start=1):
        if line:
            print(f'<text x="{MARGIN}" y="{MARGIN + FONT + number * LINE}">{html.escape(line)}</text>')
    print("</g></svg>")


if __name__ == "__main__":
    main()
