// SPDX-License-Identifier: MIT OR Apache-2.0
//! Foreign text in a page: whoever names a thread writes no markup, turns no line around and fills no screen.

use std::fmt::{self, Display, Formatter, Write as _};

use whylate_model::units::{format_ns, printable};

use crate::output::table::without_middle;

/// Longer names lose their middle: the kernel's are shorter, but for paths of cgroups and mangled functions.
const LONGEST: usize = 160;
const LONGEST_SENTENCE: usize = 1_000;

/// A name as it may be shown: of printable characters, and without most of its length.
pub fn name(text: &str) -> String {
    without_middle(&printable(text), LONGEST)
}

/// Such a sentence for the script, which makes text of it.
pub fn short_sentence(text: &str) -> String {
    without_middle(&printable(text), LONGEST_SENTENCE)
}

/// Such a name as text or as the value of an attribute in quotes.
pub fn text(text: &str) -> Text {
    Text(name(text))
}

/// The same of a sentence of our own with names in it.
pub fn sentence(text: &str) -> Text {
    Text(short_sentence(text))
}

pub struct Text(String);

impl Display for Text {
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

/// A cell with a duration, which is sorted by its nanoseconds.
pub fn ns(ns: Option<u64>) -> String {
    ns.map_or_else(none, |ns| format!("<td class=\"n\" data-v=\"{ns}\">{}</td>", format_ns(ns)))
}

/// A cell with a number.
pub fn count(count: Option<u64>) -> String {
    count.map_or_else(none, |count| format!("<td class=\"n\" data-v=\"{count}\">{count}</td>"))
}

/// A cell with a share.
pub fn share(share: f64) -> String {
    format!("<td class=\"n\" data-v=\"{share}\">{:.1}%</td>", share * 100.0)
}

/// A cell with any other figure.
pub fn number(value: f64) -> String {
    format!("<td class=\"n\" data-v=\"{value}\">{}</td>", digits(value))
}

/// A cell for what is not known.
pub fn none() -> String {
    "<td class=\"n\">-</td>".to_owned()
}

/// A cell with a name.
pub fn named(of: &str) -> String {
    format!("<td>{}</td>", text(of))
}

/// A cell with a bar of that share.
pub fn bar(share: f64) -> String {
    format!(
        "<td class=\"bar\"><svg viewBox=\"0 0 1000 10\" preserveAspectRatio=\"none\" aria-hidden=\"true\"><path d=\"M0 0h{:.0}v10h-{:.0}z\"/></svg></td>",
        share.clamp(0.0, 1.0) * 1000.0,
        share.clamp(0.0, 1.0) * 1000.0
    )
}

/// As many digits as are of use.
pub fn digits(value: f64) -> String {
    if value.fract() == 0.0 || value.abs() >= 1000.0 { format!("{value:.0}") } else { format!("{value:.2}") }
}

/// A table's head. `<` stands before columns of names.
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
    fn names_are_text_and_nothing_else() {
        assert_eq!(
            text("</script><img src=x onerror='a'>&\"").to_string(),
            "&lt;/script&gt;&lt;img src=x onerror=&#39;a&#39;&gt;&amp;&quot;"
        );
        assert_eq!(name("a\u{202e}b\u{2066}c\x1b[2Jd\u{200f}\u{feff}"), "a?b?c?[2Jd??");
        assert_eq!(name(&"x".repeat(4_096)).len(), LONGEST);
    }

    #[test]
    fn figures_have_their_values_beside_them() {
        assert_eq!(ns(Some(1_500_000)), "<td class=\"n\" data-v=\"1500000\">1.50ms</td>");
        assert_eq!((count(None), share(0.125)), (none(), "<td class=\"n\" data-v=\"0.125\">12.5%</td>".to_owned()));
        assert_eq!(
            (digits(3.0), digits(0.456), digits(12_345.6)),
            ("3".to_owned(), "0.46".to_owned(), "12346".to_owned())
        );
    }

    proptest! {
        #[test]
        fn no_text_opens_a_tag_or_ends_an_attribute(given in ".{0,200}") {
            let told = text(&given).to_string();
            prop_assert!(!told.contains(['<', '>', '"', '\'']));
            prop_assert!(!told.chars().any(|c| !is_printable(c)));
        }
    }
}
