// SPDX-License-Identifier: MIT OR Apache-2.0
//! Renders a histogram by powers of two, in bcc's layout.

use std::io::{self, Write};

use whylate_model::Histogram;

use crate::render::text::pad::{Left, Right};

/// Number of stars of the fullest row.
const STARS: u64 = 40;
/// Rows above this power of two need wider columns.
const NARROW_POWERS: usize = 32;

/// Writes rows from 0 to the highest one with a count, each twice as wide as the previous. Writes nothing for an empty
/// histogram.
pub fn write(out: &mut dyn Write, histogram: &Histogram) -> io::Result<()> {
    write_from(out, histogram, 0)
}

/// Writes the same rows, from the first one with a count: for screens with little room.
pub fn write_filled(out: &mut dyn Write, histogram: &Histogram) -> io::Result<()> {
    let first = rows(histogram).iter().position(|&count| count > 0);
    write_from(out, histogram, first.unwrap_or(0))
}

fn write_from(out: &mut dyn Write, histogram: &Histogram, first: usize) -> io::Result<()> {
    let rows = rows(histogram);
    let Some(&fullest) = rows.iter().max() else {
        return Ok(());
    };
    let narrow = rows.len() <= NARROW_POWERS;
    // Wide rows have half the stars, so that both fit into 80 columns.
    let (number, stars) = if narrow { (10, STARS) } else { (20, STARS / 2) };
    if narrow {
        writeln!(out, "     {:<19} : count     distribution", "usecs")?;
    } else {
        writeln!(out, "               {:<29} : count     distribution", "usecs")?;
    }
    for (power, &count) in rows.iter().enumerate().skip(first) {
        let low = if power == 0 { 0 } else { 1u128 << power };
        let high = (1u128 << (power + 1)) - 1;
        let filled = usize::try_from(u128::from(count) * u128::from(stars) / u128::from(fullest.max(1))).unwrap_or(0);
        let (low, high, bar) = (low.to_string(), high.to_string(), "*".repeat(filled));
        let (low, high, bar) = (Right(&low, number), Left(&high, number), Left(&bar, stars as usize));
        writeln!(out, "{low} -> {high} : {count:<8} |{bar}|")?;
    }
    Ok(())
}

/// Returns counts by power of two of microseconds: row 0 has 0 and 1, row n has 2^n to 2^(n+1) - 1.
///
/// A bucket across a bound (one in eight, at most 2.4 % beyond the bound) counts in the row of its middle.
fn rows(histogram: &Histogram) -> Vec<u64> {
    let mut rows = Vec::new();
    for (range, count) in histogram.iter() {
        let middle_ns = range.start() / 2 + range.end() / 2 + (range.start() & range.end() & 1);
        let row = (middle_ns / 1_000).checked_ilog2().unwrap_or(0) as usize;
        if rows.len() <= row {
            rows.resize(row + 1, 0);
        }
        rows[row] += count;
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drawn(histogram: &Histogram) -> String {
        crate::render::text::text_of(|out| write(out, histogram))
    }

    /// Returns a histogram with `counts[n]` values in the middle of row n.
    fn filled(counts: &[u64]) -> Histogram {
        let values = counts.iter().enumerate().flat_map(|(power, &count)| {
            let middle_ns = 1_500 << power;
            std::iter::repeat_n(middle_ns, count as usize)
        });
        values.collect()
    }

    #[test]
    fn the_layout_is_that_of_bcc() {
        let idle = [87, 7, 60, 167, 53, 24, 3, 4, 1, 0, 0, 1012, 3953, 5035];
        insta::assert_snapshot!(drawn(&filled(&idle)));
    }

    #[test]
    fn long_latencies_widen_the_columns() {
        let long: Histogram = [1u64 << 63, 5_000].into_iter().collect();
        insta::assert_snapshot!(drawn(&long));
    }

    #[test]
    fn screens_have_no_empty_rows_before_the_first_value() {
        let late = filled(&[0, 0, 0, 2, 0, 1]);
        let shown = crate::render::text::text_of(|out| write_filled(out, &late));
        let all = drawn(&late);
        let (heading, rows) = all.split_once('\n').expect("rows");
        assert_eq!(shown, format!("{heading}\n{}", rows.split_inclusive('\n').skip(3).collect::<String>()));
    }

    #[test]
    fn empty_histogram_renders_nothing() {
        assert_eq!(drawn(&Histogram::default()), "");
    }
}
