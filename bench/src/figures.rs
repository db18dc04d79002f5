// SPDX-License-Identifier: MIT OR Apache-2.0
//! Statistics of figures over several rounds.

/// Returns the median; 0 without values.
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

/// Returns the median of a figure of each element.
pub fn median_of<T>(values: &[T], figure: impl Fn(&T) -> f64) -> f64 {
    median(&values.iter().map(figure).collect::<Vec<_>>())
}

/// Returns the first quartile; 0 without values.
pub fn first_quartile(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 4).copied().unwrap_or(0.0)
}

/// Returns the 95 % confidence interval of the population's median, by the sign test, which assumes no distribution.
/// `None` with fewer than six values, which are too few for that confidence.
pub fn median_interval(values: &[f64]) -> Option<(f64, f64)> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let mut left_out = 0;
    // Probability that this number of values or fewer is below the median; 2.5 % on each side.
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

/// Median, minimum and maximum over all rounds.
pub struct Spread {
    pub median: f64,
    pub min: f64,
    pub max: f64,
}

impl Spread {
    pub fn from_values(values: &[f64]) -> Self {
        let min = values.iter().copied().fold(f64::INFINITY, f64::min);
        Self { median: median(values), min, max: values.iter().copied().fold(f64::NEG_INFINITY, f64::max) }
    }
}

/// A figure with its limit, which may itself be measured.
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

/// Returns an empty line and a table, with the numbers of decimals of figure and limit.
pub fn table<'a>(checks: impl IntoIterator<Item = &'a Check>, [digits, limit_digits]: [usize; 2]) -> String {
    let mut text = "\n| figure | measured | limit | result |\n|---|--:|--:|---|\n".to_owned();
    for Check { what, value, unit, limit } in checks {
        let unit = if unit.is_empty() { String::new() } else { format!(" {unit}") };
        let result = verdict(*value, *limit);
        text += &format!("| {what} | {value:.digits$}{unit} | {limit:.limit_digits$}{unit} | {result} |\n");
    }
    text
}

/// Returns the verdict on a figure and its limit.
pub fn verdict(value: f64, limit: f64) -> &'static str {
    if value <= limit { "pass" } else { "**fail**" }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn median_is_the_middle_value() {
        assert!((median(&[3.0, 1.0, 2.0]) - 2.0).abs() < 1e-9);
        assert!((median(&[4.0, 1.0, 2.0, 3.0]) - 2.5).abs() < 1e-9);
    }

    #[test]
    fn first_quartile_has_a_quarter_below() {
        assert!((first_quartile(&[4.0, 1.0, 2.0, 3.0]) - 2.0).abs() < 1e-9);
        assert!(first_quartile(&[]).abs() < 1e-9);
    }

    #[test]
    fn median_interval_matches_sign_test_tables() {
        let of = |count: u32| median_interval(&(1..=count).map(f64::from).collect::<Vec<_>>());
        assert_eq!(of(0), None);
        assert_eq!(of(5), None);
        // As in tables of the sign test: the first and last of 6, the second of 9, the fourth of 15, the sixth of 20.
        assert_eq!(of(6), Some((1.0, 6.0)));
        assert_eq!(of(9), Some((2.0, 8.0)));
        assert_eq!(of(15), Some((4.0, 12.0)));
        assert_eq!(of(20), Some((6.0, 15.0)));
    }
}
