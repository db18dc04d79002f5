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

/// The median of what `figure` tells of each.
pub fn median_of<T>(of: &[T], figure: impl Fn(&T) -> f64) -> f64 {
    median(&of.iter().map(figure).collect::<Vec<_>>())
}

/// A quarter of them are smaller; 0 of none.
pub fn first_quartile(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 4).copied().unwrap_or(0.0)
}

/// Where the median of what they are a sample of lies, with a confidence of 95 %: the sign test's interval, which
/// assumes nothing of how they are spread. `None` of fewer than six, of which no two are far enough apart.
pub fn median_interval(values: &[f64]) -> Option<(f64, f64)> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let mut left_out = 0;
    // The chance that so many or fewer are below the median: with as many above, it may be 5 % together.
    let mut chance = 0.5_f64.powi(i32::try_from(sorted.len()).ok()?);
    let mut term = chance;
    while chance <= 0.025 {
        left_out += 1;
        term *= (sorted.len() + 1 - left_out) as f64 / left_out as f64;
        chance += term;
    }
    let first = sorted.get(left_out.checked_sub(1)?)?;
    Some((*first, *sorted.get(sorted.len() - left_out)?))
}

/// Median, smallest and largest of all rounds.
pub struct Spread {
    pub median: f64,
    pub min: f64,
    pub max: f64,
}

impl Spread {
    pub fn of(values: &[f64]) -> Self {
        let min = values.iter().copied().fold(f64::INFINITY, f64::min);
        Self { median: median(values), min, max: values.iter().copied().fold(f64::NEG_INFINITY, f64::max) }
    }
}

/// A figure with its limit, which may be what was measured beside it.
pub struct Check {
    what: String,
    value: f64,
    unit: &'static str,
    limit: f64,
}

impl Check {
    pub fn new(what: impl Into<String>, value: f64, unit: &'static str, limit: f64) -> Self {
        Self { what: what.into(), value, unit, limit }
    }

    pub fn is_within(&self) -> bool {
        self.value <= self.limit
    }
}

/// An empty line and a table, with so many digits of a figure and of its limit.
pub fn table<'a>(checks: impl IntoIterator<Item = &'a Check>, [digits, of_limit]: [usize; 2]) -> String {
    let mut text = "\n| figure | measured | limit | result |\n|---|--:|--:|---|\n".to_owned();
    for Check { what, value, unit, limit } in checks {
        let unit = if unit.is_empty() { String::new() } else { format!(" {unit}") };
        let result = word(*value, *limit);
        text += &format!("| {what} | {value:.digits$}{unit} | {limit:.of_limit$}{unit} | {result} |\n");
    }
    text
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

    #[test]
    fn intervals_of_the_median_are_those_of_the_sign_test() {
        let of = |count: u32| median_interval(&(1..=count).map(f64::from).collect::<Vec<_>>());
        assert_eq!(of(0), None);
        assert_eq!(of(5), None);
        // As tables have them: the first and the last of 6, the second of 9, the fourth of 15, the sixth of 20.
        assert_eq!(of(6), Some((1.0, 6.0)));
        assert_eq!(of(9), Some((2.0, 8.0)));
        assert_eq!(of(15), Some((4.0, 12.0)));
        assert_eq!(of(20), Some((6.0, 15.0)));
    }
}
