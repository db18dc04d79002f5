// SPDX-License-Identifier: MIT OR Apache-2.0
//! Draws a terminal's screen, as printed by `tmux capture-pane -e -p`, as an SVG for the documentation.

use std::fmt::Write as _;
use std::io::{self, Read as _, Write as _};

use anyhow::{Context as _, Result};
use clap::Args;

/// Size of a character cell in pixels.
const WIDTH: f64 = 8.4;
const HEIGHT: f64 = 18.0;
const MARGIN: f64 = 14.0;
/// Readable on light and on dark pages: the picture has its own background.
const STYLE: &str = "\
    rect.page { fill: #16181d } rect.reversed { fill: #d7dae0 }\n\
    text { font: 14px 'DejaVu Sans Mono', Menlo, Consolas, monospace; fill: #d7dae0; white-space: pre }\n\
    .bold { font-weight: bold; fill: #ffffff } .red { fill: #ff8a80 } .reversed { fill: #16181d }";

/// Draw a terminal's screen as an SVG: reads what `tmux capture-pane -e -p` prints
#[derive(Debug, Args)]
pub struct Arguments {
    /// Description of the picture, for readers who cannot see it
    #[arg(long)]
    title: String,
}

pub fn run(arguments: &Arguments) -> Result<()> {
    let mut screen = String::new();
    io::stdin().read_to_string(&mut screen).context("cannot read the screen")?;
    io::stdout().write_all(svg(&arguments.title, &screen).as_bytes()).context("cannot write the picture")
}

/// Graphic rendition of characters.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Rendition {
    bold: bool,
    reversed: bool,
    red: bool,
}

impl Rendition {
    /// Applies the parameters of an SGR sequence (ECMA-48, 8.3.117); colors other than red are not drawn.
    fn select(&mut self, numbers: &str) {
        for number in numbers.split([';', ':']) {
            match number {
                "" | "0" => *self = Rendition::default(),
                "1" => self.bold = true,
                "22" => self.bold = false,
                "7" => self.reversed = true,
                "27" => self.reversed = false,
                "31" | "91" => self.red = true,
                "39" => self.red = false,
                _ => {}
            }
        }
    }

    fn classes(self) -> String {
        let all = [(self.bold, "bold"), (self.red, "red"), (self.reversed, "reversed")];
        all.iter().filter(|(is_so, _)| *is_so).map(|(_, name)| *name).collect::<Vec<_>>().join(" ")
    }
}

fn svg(title: &str, screen: &str) -> String {
    let mut rendition = Rendition::default();
    let lines: Vec<Vec<(Rendition, String)>> = screen.lines().map(|line| parts(line, &mut rendition)).collect();
    let length = |line: &Vec<(Rendition, String)>| line.iter().map(|(_, text)| text.chars().count()).sum::<usize>();
    let columns = lines.iter().map(length).max().unwrap_or(0) as f64;
    let (width, height) = (columns * WIDTH + 2.0 * MARGIN, lines.len() as f64 * HEIGHT + 2.0 * MARGIN);
    let title = escaped(title);
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width:.0}\" height=\"{height:.0}\" viewBox=\"0 0 {width:.0} {height:.0}\" \
         role=\"img\" aria-label=\"{title}\">\n<title>{title}</title>\n<style>{STYLE}</style>\n\
         <rect class=\"page\" width=\"100%\" height=\"100%\" rx=\"8\"/>\n"
    );
    for (number, line) in lines.iter().enumerate() {
        let top = MARGIN + number as f64 * HEIGHT;
        let mut x = MARGIN;
        for (rendition, text) in line {
            let (wide, classes) = (text.chars().count() as f64 * WIDTH, rendition.classes());
            if rendition.reversed {
                let _ = writeln!(
                    out,
                    "<rect class=\"reversed\" x=\"{x:.1}\" y=\"{top:.1}\" width=\"{wide:.1}\" height=\"{HEIGHT}\"/>"
                );
            }
            if !text.trim().is_empty() {
                let class = if classes.is_empty() { String::new() } else { format!(" class=\"{classes}\"") };
                // Columns stay aligned in any font.
                let _ = writeln!(
                    out,
                    "<text{class} x=\"{x:.1}\" y=\"{:.1}\" textLength=\"{wide:.1}\" lengthAdjust=\"spacingAndGlyphs\" xml:space=\"preserve\">{}</text>",
                    top + HEIGHT * 0.75,
                    escaped(text)
                );
            }
            x += wide;
        }
    }
    out + "</svg>\n"
}

/// Splits a line into parts of equal rendition.
fn parts(line: &str, rendition: &mut Rendition) -> Vec<(Rendition, String)> {
    let mut parts: Vec<(Rendition, String)> = Vec::new();
    let mut rest = line;
    while !rest.is_empty() {
        let text = rest.find('\x1b').map_or(rest, |at| &rest[..at]);
        if !text.is_empty() {
            match parts.last_mut().filter(|(of, _)| of == rendition) {
                Some((_, before)) => before.push_str(text),
                None => parts.push((*rendition, text.to_owned())),
            }
        }
        rest = &rest[text.len()..];
        if let Some(sequence) = rest.strip_prefix('\x1b') {
            // A sequence ends with its first letter; other sequences than SGR are dropped.
            let end = sequence.find(|c: char| c.is_ascii_alphabetic()).map_or(sequence.len(), |at| at + 1);
            let (sequence, after) = sequence.split_at(end);
            if let Some(numbers) = sequence.strip_prefix('[').and_then(|of| of.strip_suffix('m')) {
                rendition.select(numbers);
            }
            rest = after;
        }
    }
    parts
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn renditions_are_drawn_and_columns_aligned() {
        let picture = svg("a <screen>", "\x1b[1mbold\x1b[0m plain\n\x1b[7;31m> ▆ & x\x1b[39m\x1b[27m  y");
        assert!(picture.contains("<title>a &lt;screen&gt;</title>"), "{picture}");
        assert!(picture.contains("class=\"bold\" x=\"14.0\"") && picture.contains(">bold</text>"), "{picture}");
        assert!(picture.contains("<text x=\"47.6\"") && picture.contains("> plain</text>"), "{picture}");
        assert!(picture.contains("class=\"red reversed\"") && picture.contains("&gt; ▆ &amp; x</text>"), "{picture}");
        assert!(picture.contains(">  y</text>") && !picture.contains('\x1b'), "{picture}");
    }
}
