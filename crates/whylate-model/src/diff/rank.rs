// SPDX-License-Identifier: MIT OR Apache-2.0
//! Nonparametric test of two samples, and correction for multiple comparisons.

/// Result of a test.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Verdict {
    /// Standardized rank difference; positive if the later sample is larger.
    pub z: f64,
    /// Two-sided p-value.
    pub p: f64,
    /// Factor by which autocorrelation inflates the variance.
    pub widened: f64,
}

/// Maximum autocorrelation that is corrected for: a sample that repeats itself carries no information.
const MAX_CORRELATION: f64 = 0.95;

/// Computes the Mann–Whitney U test: two-sided, by the normal approximation with corrections for ties and continuity
/// (Lehmann, Nonparametrics, 1975, section 1.4), which errs on the side of no difference for short samples.
///
/// The test assumes independent values, but neighboring blocks of time are not: a compiler runs for many of them. Each
/// sample is therefore modeled as a first-order autoregression: its mean varies as if there were fewer values, by
/// (1 + r) / (1 - r) for r the correlation of neighbors (Bayley and Hammersley, 1946). The correlation is estimated from
/// the ranks, jointly for both samples, and corrected for the bias of short samples (Kendall, 1954).
pub fn mann_whitney(before: &[f64], after: &[f64]) -> Verdict {
    let nothing = Verdict { z: 0.0, p: 1.0, widened: 1.0 };
    let (n, m) = (before.len() as f64, after.len() as f64);
    if before.is_empty() || after.is_empty() {
        return nothing;
    }
    let (ranks, ties) = midranks(before, after);
    let all = n + m;
    let variance = n * m / 12.0 * (all + 1.0 - ties / (all * (all - 1.0)).max(1.0));
    // All values are equal.
    if variance <= 0.0 {
        return nothing;
    }
    let (of_before, of_after) = ranks.split_at(before.len());
    let above = of_after.iter().sum::<f64>() - m * (all + 1.0) / 2.0;
    let widened = widening(of_before, of_after);
    let z = (above.abs() - 0.5).max(0.0).copysign(above) / (variance * widened).sqrt();
    Verdict { z, p: erfc(z.abs() / std::f64::consts::SQRT_2).min(1.0), widened }
}

/// Returns the rank of each value (the mean rank for ties), and the correction of the variance for ties.
fn midranks(before: &[f64], after: &[f64]) -> (Vec<f64>, f64) {
    let values: Vec<f64> = before.iter().chain(after).copied().collect();
    let mut order: Vec<usize> = (0..values.len()).collect();
    order.sort_by(|&a, &b| values[a].total_cmp(&values[b]));
    let (mut ranks, mut ties) = (vec![0.0; values.len()], 0.0);
    for equal in order.chunk_by(|&a, &b| values[a] == values[b]) {
        // Each chunk is a sorted part of `order`; the number of smaller values gives its start.
        let below = equal.first().map_or(0, |&first| order.partition_point(|&at| values[at] < values[first]));
        let count = equal.len() as f64;
        ties += count * count * count - count;
        for &at in equal {
            ranks[at] = below as f64 + (count + 1.0) / 2.0;
        }
    }
    (ranks, ties)
}

/// Returns the factor by which autocorrelation inflates the variance of the rank sum.
fn widening(before: &[f64], after: &[f64]) -> f64 {
    let (mut along, mut own) = (0.0, 0.0);
    for ranks in [before, after] {
        let mean = ranks.iter().sum::<f64>() / ranks.len() as f64;
        own += ranks.iter().map(|rank| (rank - mean).powi(2)).sum::<f64>();
        along += ranks.windows(2).map(|pair| (pair[0] - mean) * (pair[1] - mean)).sum::<f64>();
    }
    if own <= 0.0 {
        return 1.0;
    }
    let (seen, length) = (along / own, (before.len() + after.len()) as f64 / 2.0);
    let correlation = (seen + (1.0 + 3.0 * seen) / length).clamp(0.0, MAX_CORRELATION);
    (1.0 + correlation) / (1.0 - correlation)
}

/// Returns the minimum change of the mean: the bound nearer to 0 of the 68 % confidence interval of the difference, or
/// 0 if the interval contains 0. It is small if the change comes from a few outliers, as it should be; a wider interval
/// would contain 0 for delays that occur in one of five blocks, however large they are.
pub fn surely_changed(before: &[f64], after: &[f64], widened: f64) -> f64 {
    let mean_and_variance = |values: &[f64]| {
        let count = values.len() as f64;
        let mean = values.iter().sum::<f64>() / count;
        let variance = values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / (count - 1.0).max(1.0);
        (mean, variance / count)
    };
    let ((was, of_was), (is, of_is)) = (mean_and_variance(before), mean_and_variance(after));
    let change = is - was;
    (change.abs() - ((of_was + of_is) * widened).sqrt()).max(0.0).copysign(change)
}

/// Computes the procedure of Benjamini and Hochberg (1995): for each p-value the smallest false discovery rate at which
/// it is significant.
pub fn benjamini_hochberg(probabilities: &[f64]) -> Vec<f64> {
    let mut order: Vec<usize> = (0..probabilities.len()).collect();
    order.sort_by(|&a, &b| probabilities[b].total_cmp(&probabilities[a]));
    let (mut adjusted, mut least) = (vec![1.0; probabilities.len()], 1.0_f64);
    for (above, &at) in order.iter().enumerate() {
        let rank = (probabilities.len() - above) as f64;
        least = least.min(probabilities[at] * probabilities.len() as f64 / rank);
        adjusted[at] = least;
    }
    adjusted
}

/// Computes the complementary error function, to 1.2e-7 of its value (Numerical Recipes, 2nd edition, section 6.2).
fn erfc(x: f64) -> f64 {
    let t = 1.0 / (1.0 + 0.5 * x.abs());
    let terms = [
        0.170_872_77,
        -0.822_152_23,
        1.488_515_87,
        -1.135_203_98,
        0.278_868_07,
        -0.186_288_06,
        0.096_784_18,
        0.374_091_96,
        1.000_023_68,
        -1.265_512_23,
    ];
    let power = terms.into_iter().fold(0.0, |sum, term| sum * t + term);
    let tail = t * (power - x * x).exp();
    if x >= 0.0 { tail } else { 2.0 - tail }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_near(one: f64, other: f64) -> bool {
        (one - other).abs() <= 1e-3 * one.abs().max(other.abs())
    }

    #[test]
    fn matches_reference_values() {
        // The first by the formula with Python's math.erfc, without autocorrelation.
        let (a, b) = ([1.0, 9.0, 2.0, 8.0, 3.0, 7.0, 4.0, 6.0], [15.0, 5.0, 14.0, 6.0, 13.0, 7.0, 12.0, 8.0]);
        let verdict = mann_whitney(&a, &b);
        assert_eq!(verdict.widened, 1.0);
        assert!(is_near(verdict.p, 0.035_285), "{verdict:?}");
        assert!(is_near(erfc(1.0), 0.157_299) && is_near(erfc(4.0), 1.541_7e-8) && is_near(erfc(-1.0), 1.842_701));
        let adjusted = benjamini_hochberg(&[0.01, 0.04, 0.03, 0.5]);
        let expected = [0.04, 0.053_333, 0.053_333, 0.5];
        assert!(adjusted.iter().zip(expected).all(|(&a, b)| is_near(a, b)), "{adjusted:?}");
    }

    #[test]
    fn equal_samples_do_not_differ() {
        let values = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0, 6.0];
        assert_eq!(mann_whitney(&values, &values).p, 1.0);
        assert_eq!(mann_whitney(&[0.0; 9], &[0.0; 9]).p, 1.0);
        assert_eq!(mann_whitney(&[], &values).p, 1.0);
        assert_eq!(surely_changed(&values, &values, 1.0), 0.0);
    }

    #[test]
    fn autocorrelated_values_count_less() {
        let [low, high] = [[1.0; 8], [2.0; 8]];
        let steps: Vec<f64> = (0..16).map(|at| f64::from(at / 4)).collect();
        let spread: Vec<f64> = (0..16).map(|at| f64::from(at % 4)).collect();
        let shifted = |values: &[f64]| values.iter().map(|value| value + 1.5).collect::<Vec<_>>();
        let [in_steps, in_turn] = [&steps, &spread].map(|values| mann_whitney(values, &shifted(values)));
        assert!(in_steps.widened > 3.0 && in_steps.p > 10.0 * in_turn.p, "{in_steps:?} {in_turn:?}");
        assert_eq!(mann_whitney(&low, &high).widened, 1.0);
        assert!(mann_whitney(&low, &high).p < 1e-3 && mann_whitney(&high, &low).z < 0.0);
    }
}
