// SPDX-License-Identifier: MIT OR Apache-2.0
//! What figures of several rounds come to.

/// The middle one, or the mean of the two in the middle; 0 of none.
pub fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => 0.0,
        length if length % 2 == 1 => sorted[middle],
        _ => (sorted[middle - 1] + sorted[middle]) / 2.0,
    }
}

/// A quarter of them are smaller; 0 of none.
pub fn first_quartile(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 4).copied().unwrap_or(0.0)
}

/// Whether a figure is within its limit.
pub fn word(value: f64, limit: f64) -> &'static str {
    if value <= limit { "pass" } else { "**fail**" }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_in_the_middle() {
        assert!((median(&[3.0, 1.0, 2.0]) - 2.0).abs() < 1e-9);
        assert!((median(&[4.0, 1.0, 2.0, 3.0]) - 2.5).abs() < 1e-9);
    }

    #[test]
    fn a_quarter_is_smaller_than_the_first_quartile() {
        assert!((first_quartile(&[4.0, 1.0, 2.0, 3.0]) - 2.0).abs() < 1e-9);
        assert!(first_quartile(&[]).abs() < 1e-9);
    }
}
