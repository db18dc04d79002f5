// SPDX-License-Identifier: MIT OR Apache-2.0
//! Unit tests of `src/table.rs`, which includes this file.

use super::*;

#[test]
fn figures_show_limit_and_result() {
    let rows = [
        Figure::new("a (s)", 1.25, 1).at_most(2.0),
        Figure::new("b", 2.5, 2).unit("points").at_most(2.25),
        Figure::median("c", 0, &[1.0, 300.0, 7.0], |value| *value).at_most(300.0),
        Figure::new("d", 0.0, 2),
        Figure::text("e", "1 to 2 %".to_owned()),
        Figure::new("not measured", f64::NAN, 0).at_most(1.0),
    ];
    assert_eq!(
        figures(&rows),
        "| figure | measured | limit | result |\n|---|--:|--:|---|\n| a (s) | 1.2 | 2 | pass |\n\
         | b | 2.50 points | 2.25 points | **fail** |\n| c | 7 | 300 | pass |\n| d | 0.00 |  |  |\n\
         | e | 1 to 2 % |  |  |\n| not measured | NaN | 1 | **fail** |\n"
    );
    assert_eq!(rows.map(|row| row.is_within()), [true, false, true, true, true, false]);
}

#[test]
fn grid_has_a_row_per_subject() {
    let columns = [
        column("median", Show::Median(1), " %", |sample: &(f64, f64)| sample.0),
        column("all", Show::Spread(0), "", |sample| sample.0),
        column("second", Show::Range(0), " %", |sample| sample.1),
    ];
    let (first, second) = ([(1.0, f64::NAN), (2.0, f64::NAN)], [(3.0, 4.0), (5.0, 6.0), (4.0, 8.0)]);
    let rows = [("a | x".to_owned(), first.iter().collect()), ("b | y".to_owned(), second.iter().collect())];
    assert_eq!(
        grid("name | what", &columns, rows),
        "| name | what | median | all | second |\n|---|---|--:|--:|--:|\n| a | x | 1.5 % | 2 (1 to 2) | – |\n\
         | b | y | 4.0 % | 4 (3 to 5) | 4, 8 % |\n"
    );
}

#[test]
fn cells_show_statistics() {
    let values = [0.5, 0.25, 0.75, 1.0, 1.25, 1.5];
    let cell = |show: Show| show.cell(&values, " %");
    assert_eq!([cell(Show::Interval(2)), cell(Show::Quartile(2))], ["0.25 to 1.50 %", "0.50 %"]);
    assert_eq!([cell(Show::Min(1)), cell(Show::Max(1)), cell(Show::Mean(3))], ["0.2 %", "1.5 %", "0.875 %"]);
    assert_eq!(Show::Interval(2).cell(&values[..2], ""), "too few rounds");
    assert_eq!(Show::Median(2).cell(&[], ""), "–");
}

#[test]
fn median_and_quartile_are_of_sorted_values() {
    assert!((median(&[3.0, 1.0, 2.0]) - 2.0).abs() < 1e-9 && (median(&[4.0, 1.0, 2.0, 3.0]) - 2.5).abs() < 1e-9);
    assert!((first_quartile(&[4.0, 1.0, 2.0, 3.0]) - 2.0).abs() < 1e-9 && first_quartile(&[]).abs() < 1e-9);
}

#[test]
fn median_interval_matches_sign_test_tables() {
    let of = |count: u32| median_interval(&(1..=count).map(f64::from).collect::<Vec<_>>());
    assert_eq!([of(0), of(5)], [None, None]);
    // As in tables of the sign test: the first and last of 6, the second of 9, the fourth of 15, the sixth of 20.
    let expected = [(1.0, 6.0), (2.0, 8.0), (4.0, 12.0), (6.0, 15.0)];
    assert_eq!([6, 9, 15, 20].map(of), expected.map(Some));
}
