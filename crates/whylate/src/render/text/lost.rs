// SPDX-License-Identifier: MIT OR Apache-2.0
//! Renders `whylate help lost`: a line for each reason in `lost`.

use std::io::{self, Write};

use whylate_model::Card;

use crate::render::text::pad::Left;

/// Writes the reasons for lost events of these sources.
pub fn write(out: &mut dyn Write, cards: &[&Card]) -> io::Result<()> {
    writeln!(out, "Lost events could not be counted, for one of these reasons:")?;
    for card in cards {
        writeln!(out, "\n{}:", card.name)?;
        let reasons = card.reasons();
        let width = reasons.iter().map(|reason| reason.name.len()).max().unwrap_or(0);
        for reason in reasons {
            writeln!(out, "  {}  {}", Left(reason.name, width), reason.meaning)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use whylate_model::sources::{CARDS, SQPOLL};

    use super::*;

    fn printed(cards: &[&Card]) -> String {
        crate::render::text::text_of(|out| write(out, cards))
    }

    #[test]
    fn each_reason_of_a_source_has_a_line() {
        insta::assert_snapshot!(printed(&[&SQPOLL]));
        let all = printed(&CARDS);
        assert!(CARDS.iter().all(|card| all.contains(&format!("\n{}:\n", card.name))), "{all}");
    }
}
