// SPDX-License-Identifier: MIT OR Apache-2.0
//! The two kinds of tables: figures with their limits, and subjects with a column per figure of their samples.

/// Shows a figure of all rounds in a cell, with this number of decimals.
#[derive(Clone, Copy, Debug)]
pub enum Show {
    Median(usize),
    /// The median; minimum and maximum in brackets.
    Spread(usize),
    /// Minimum and maximum.
    Range(usize),
    /// The 95 % confidence interval of the median.
    Interval(usize),
    Quartile(usize),
    Mean(usize),
    Min(usize),
    Max(usize),
}

impl Show {
    /// Returns a dash if nothing was measured: no values, or only NaN.
    pub fn cell(self, values: &[f64], unit: &str) -> String {
        if values.iter().all(|value| value.is_nan()) {
            return "–".to_owned();
        }
        let one = |value: f64, digits: usize| format!("{value:.digits$}{unit}");
        let [min, max, middle] = [min(values), max(values), median(values)];
        match self {
            Self::Median(digits) => one(middle, digits),
            Self::Spread(digits) => format!("{} ({min:.digits$} to {max:.digits$})", one(middle, digits)),
            Self::Range(digits) => format!("{min:.digits$}, {}", one(max, digits)),
            Self::Interval(digits) => match median_interval(values) {
                Some((low, high)) => format!("{low:.digits$} to {}", one(high, digits)),
                None => "too few rounds".to_owned(),
            },
            Self::Quartile(digits) => one(first_quartile(values), digits),
            Self::Mean(digits) => one(values.iter().sum::<f64>() / values.len() as f64, digits),
            Self::Min(digits) => one(min, digits),
            Self::Max(digits) => one(max, digits),
        }
    }
}

/// A figure of each sample, and how its column shows it.
pub struct Column<T> {
    head: &'static str,
    show: Show,
    unit: &'static str,
    figure: fn(&T) -> f64,
}

pub fn column<T>(head: &'static str, show: Show, unit: &'static str, figure: fn(&T) -> f64) -> Column<T> {
    Column { head, show, unit, figure }
}

/// Returns a table with a row per subject: its label cells, then each column of its samples.
pub fn grid<'a, T: 'a>(
    labels: &str,
    columns: &[Column<T>],
    rows: impl IntoIterator<Item = (String, Vec<&'a T>)>,
) -> String {
    let heads: String = columns.iter().map(|column| format!(" | >{}", column.head)).collect();
    let row = |(label, samples): (String, Vec<&'a T>)| {
        let cell = |column: &Column<T>| {
            let values: Vec<f64> = samples.iter().map(|sample| (column.figure)(sample)).collect();
            format!(" | {}", column.show.cell(&values, column.unit))
        };
        label + &columns.iter().map(cell).collect::<String>()
    };
    lines(&format!("{labels}{heads}"), rows.into_iter().map(row))
}

/// Returns a table of rows such as `a | 1`. A head that begins with `>` aligns its column right.
pub fn lines(heads: &str, rows: impl IntoIterator<Item = String>) -> String {
    let rule: String = heads.split(" | ").map(|head| if head.starts_with('>') { "--:|" } else { "---|" }).collect();
    let rows: String = rows.into_iter().map(|row| format!("| {row} |\n")).collect();
    format!("| {} |\n|{rule}\n{rows}", heads.replace(" | >", " | ").trim_start_matches('>'))
}

/// A row of a section's first table: a figure, and its limit if it has one, which may itself be measured.
pub struct Figure {
    what: String,
    measured: String,
    value: f64,
    digits: usize,
    unit: &'static str,
    limit: Option<f64>,
}

impl Figure {
    pub fn new(what: impl Into<String>, value: f64, digits: usize) -> Self {
        let measured = format!("{value:.digits$}");
        Self { what: what.into(), measured, value, digits, unit: "", limit: None }
    }

    /// Returns the median of the samples' figures.
    pub fn median<T>(what: impl Into<String>, digits: usize, samples: &[T], figure: impl Fn(&T) -> f64) -> Self {
        Self::new(what, median_of(samples, figure), digits)
    }

    /// Returns a figure that is text, and has no limit.
    pub fn text(what: impl Into<String>, measured: String) -> Self {
        Self { measured, ..Self::new(what, f64::NAN, 0) }
    }

    /// Shows a unit after the figure and its limit.
    pub fn unit(self, unit: &'static str) -> Self {
        Self { unit, ..self }
    }

    pub fn at_most(self, limit: f64) -> Self {
        Self { limit: Some(limit), ..self }
    }

    pub fn is_within(&self) -> bool {
        self.limit.is_none_or(|limit| self.value <= limit)
    }

    fn row(&self) -> String {
        let (Self { what, measured, digits, .. }, unit) = (self, self.unit);
        let unit = if unit.is_empty() { String::new() } else { format!(" {unit}") };
        let Some(limit) = self.limit else { return format!("{what} | {measured}{unit} |  | ") };
        let limit = format!("{limit:.digits$}");
        let limit = if *digits > 0 { limit.trim_end_matches('0').trim_end_matches('.') } else { &limit };
        let result = if self.is_within() { "pass" } else { "**fail**" };
        format!("{what} | {measured}{unit} | {limit}{unit} | {result}")
    }
}

pub fn figures(figures: &[Figure]) -> String {
    lines("figure | >measured | >limit | result", figures.iter().map(Figure::row))
}

pub fn min(values: &[f64]) -> f64 {
    values.iter().copied().fold(f64::INFINITY, f64::min)
}

pub fn max(values: &[f64]) -> f64 {
    values.iter().copied().fold(f64::NEG_INFINITY, f64::max)
}

fn sorted(values: &[f64]) -> Vec<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted
}

/// Returns the median; 0 without values.
pub fn median(values: &[f64]) -> f64 {
    let sorted = sorted(values);
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => 0.0,
        length if length % 2 == 1 => sorted[middle],
        _ => (sorted[middle - 1] + sorted[middle]) / 2.0,
    }
}

pub fn median_of<T>(values: &[T], figure: impl Fn(&T) -> f64) -> f64 {
    median(&values.iter().map(figure).collect::<Vec<_>>())
}

/// Returns the first quartile; 0 without values.
pub fn first_quartile(values: &[f64]) -> f64 {
    sorted(values).get(values.len() / 4).copied().unwrap_or(0.0)
}

/// Returns the 95 % confidence interval of the population's median, by the sign test, which assumes no distribution.
/// `None` with fewer than six values, which are too few for that confidence.
fn median_interval(values: &[f64]) -> Option<(f64, f64)> {
    let sorted = sorted(values);
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

#[cfg(test)]
#[path = "../unit/table.rs"]
mod tests;
