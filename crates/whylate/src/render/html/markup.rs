// SPDX-License-Identifier: MIT OR Apache-2.0
//! Escapes text of unknown origin: names of threads can contain markup, bidirectional controls, or thousands of
//! characters.

use std::fmt::{self, Display, Formatter, Write as _};

use whylate_model::units::{format_ns, printable};

use crate::render::text::fit::without_middle;

/// Maximum number of characters. Longer text loses its middle: the kernel's names are shorter, except for paths of
/// cgroups and mangled functions.
const MAX_NAME: usize = 160;
const MAX_SENTENCE: usize = 1_000;

/// Escapes and shortens a name.
pub fn name(text: &(impl ToString + ?Sized)) -> String {
    without_middle(&printable(text), MAX_NAME)
}

/// Escapes and shortens a sentence for the script, which inserts it as text.
pub fn short_sentence(text: &str) -> String {
    without_middle(&printable(text), MAX_SENTENCE)
}

/// Escapes a name for HTML text or for an attribute value in quotes.
pub fn text(text: &(impl ToString + ?Sized)) -> EscapedText {
    EscapedText(name(text))
}

/// Escapes a sentence of whylate that contains names.
pub fn sentence(text: &str) -> EscapedText {
    EscapedText(short_sentence(text))
}

pub struct EscapedText(String);

impl Display for EscapedText {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        for c in self.0.chars() {
            match c {
                '&' => f.write_str("&amp;")?,
                '<' => f.write_str("&lt;")?,
                '>' => f.write_str("&gt;")?,
                '"' => f.write_str("&quot;")?,
                '\'' => f.write_str("&#39;")?,
                c => f.write_char(c)?,
            }
        }
        Ok(())
    }
}

/// Returns a cell with a duration, sorted by its nanoseconds.
pub fn ns(ns: Option<u64>) -> String {
    ns.map_or_else(empty_cell, |ns| format!("<td class=\"n\" data-v=\"{ns}\">{}</td>", format_ns(ns)))
}

/// Returns a cell with a number.
pub fn count(count: Option<u64>) -> String {
    count.map_or_else(empty_cell, |count| format!("<td class=\"n\" data-v=\"{count}\">{count}</td>"))
}

/// Returns a cell with a share.
pub fn share(share: f64) -> String {
    format!("<td class=\"n\" data-v=\"{share}\">{:.1}%</td>", share * 100.0)
}

/// Returns a cell with any other figure.
pub fn number(value: f64) -> String {
    format!("<td class=\"n\" data-v=\"{value}\">{}</td>", digits(value))
}

/// Returns a cell for an unknown value.
pub fn empty_cell() -> String {
    "<td class=\"n\">-</td>".to_owned()
}

/// Returns a cell with a name.
pub fn name_cell(of: &str) -> String {
    format!("<td>{}</td>", text(of))
}

/// Returns a cell with a bar for a share.
pub fn bar(share: f64) -> String {
    format!(
        "<td class=\"bar\"><svg viewBox=\"0 0 1000 10\" preserveAspectRatio=\"none\" aria-hidden=\"true\"><path d=\"M0 0h{:.0}v10h-{:.0}z\"/></svg></td>",
        share.clamp(0.0, 1.0) * 1000.0,
        share.clamp(0.0, 1.0) * 1000.0
    )
}

/// Formats a number with at most two decimals, and without them from 1000 on.
pub fn digits(value: f64) -> String {
    if value.fract() == 0.0 || value.abs() >= 1000.0 { format!("{value:.0}") } else { format!("{value:.2}") }
}

/// Returns a table head. `<` marks columns of text.
pub fn head(columns: &[&str]) -> String {
    let cell = |column: &&str| match column.strip_prefix('<') {
        Some(name) => format!("<th scope=\"col\">{}</th>", text(name)),
        None => format!("<th scope=\"col\" class=\"n\">{}</th>", text(column)),
    };
    format!("<thead><tr>{}</tr></thead>", columns.iter().map(cell).collect::<String>())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use whylate_model::units::is_printable;

    use super::*;

    #[test]
    fn escapes_markup_and_control_characters() {
        assert_eq!(
            text("</script><img src=x onerror='a'>&\"").to_string(),
            "&lt;/script&gt;&lt;img src=x onerror=&#39;a&#39;&gt;&amp;&quot;"
        );
        assert_eq!(name("a\u{202e}b\u{2066}c\x1b[2Jd\u{200f}\u{feff}"), "a?b?c?[2Jd??");
        assert_eq!(name(&"x".repeat(4_096)).len(), MAX_NAME);
    }

    #[test]
    fn cells_have_sort_values() {
        assert_eq!(ns(Some(1_500_000)), "<td class=\"n\" data-v=\"1500000\">1.50ms</td>");
        assert_eq!(
            (count(None), share(0.125)),
            (empty_cell(), "<td class=\"n\" data-v=\"0.125\">12.5%</td>".to_owned())
        );
        assert_eq!(
            (digits(3.0), digits(0.456), digits(12_345.6)),
            ("3".to_owned(), "0.46".to_owned(), "12346".to_owned())
        );
    }

    proptest! {
        #[test]
        fn escaped_text_has_no_tags_or_quotes(input in ".{0,200}") {
            let escaped = text(&input).to_string();
            prop_assert!(!escaped.contains(['<', '>', '"', '\'']));
            prop_assert!(!escaped.chars().any(|c| !is_printable(c)));
        }
    }
}
