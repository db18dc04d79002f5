// SPDX-License-Identifier: MIT OR Apache-2.0
//! Figures in fio's JSON output.

use serde_json::Value;

/// Figures as fio reports them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Figures {
    /// Number of requests.
    pub requests: u64,
    /// Duration of the run.
    pub duration_ns: u64,
    /// The shortest latency.
    pub min_ns: u64,
    /// The mean latency.
    pub mean_ns: u64,
    /// The longest latency.
    pub max_ns: u64,
    /// 99th percentile of the latency.
    pub p99_ns: u64,
}

impl Figures {
    /// Parses fio's JSON, which notes may precede.
    pub fn parse(out: &str, direction: &str) -> Option<Self> {
        let json: Value = serde_json::from_str(out.get(out.find('{')?..)?).ok()?;
        let job = json.get("jobs")?.get(0)?.get(direction)?;
        let latency = job.get("lat_ns")?;
        Some(Figures {
            requests: job.get("total_ios")?.as_u64()?,
            duration_ns: job.get("runtime")?.as_u64()?.saturating_mul(1_000_000),
            min_ns: latency.get("min")?.as_u64()?,
            mean_ns: latency.get("mean")?.as_f64()? as u64,
            max_ns: latency.get("max")?.as_u64()?,
            p99_ns: latency.get("percentile")?.get("99.000000")?.as_u64()?,
        })
    }

    /// Returns mean and 99th percentile, each unless it contradicts the other figures.
    pub fn trusted(&self, depth: u32) -> (Option<u64>, Option<u64>) {
        let mean_ns = self.mean_is_possible(depth).then_some(self.mean_ns);
        (mean_ns, (mean_ns.is_some() && self.p99_is_possible()).then_some(self.p99_ns))
    }

    /// Checks the mean: with at most `depth` requests in flight, all latencies add up to at most `depth` times the run.
    fn mean_is_possible(&self, depth: u32) -> bool {
        let all_ns = u128::from(self.mean_ns) * u128::from(self.requests);
        // fio rounds the run to a millisecond, and lets requests in flight at its end finish.
        let longest_ns = u128::from(depth) * (u128::from(self.duration_ns) + 1_000_000 + u128::from(self.max_ns));
        self.min_ns <= self.mean_ns && self.mean_ns <= self.max_ns && all_ns <= longest_ns
    }

    /// Checks the 99th percentile: 1 % of the requests take at least that long, so it is at most 100 times the mean.
    fn p99_is_possible(&self) -> bool {
        // fio's buckets are 1.6 % wide.
        let at_most = |ns: u64| ns.saturating_add(ns / 32);
        self.min_ns <= at_most(self.p99_ns)
            && self.p99_ns <= at_most(self.max_ns)
            && self.p99_ns <= at_most(self.mean_ns.saturating_add(1).saturating_mul(100))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OUT: &str = r#"note: something
        {"jobs": [{"read": {"total_ios": 500, "runtime": 2000,
            "lat_ns": {"min": 700, "max": 1900, "mean": 812.5, "percentile": {"99.000000": 1500}},
            "clat_ns": {"mean": 0.0, "percentile": {"99.000000": 3070000000}}}}]}"#;

    const FIGURES: Figures =
        Figures { requests: 500, duration_ns: 2_000_000_000, min_ns: 700, mean_ns: 812, max_ns: 1_900, p99_ns: 1_500 };

    #[test]
    fn parses_fio_json() {
        assert_eq!(Figures::parse(OUT, "read"), Some(FIGURES));
        let forever = Figures::parse(&OUT.replace("2000", &u64::MAX.to_string()), "read").expect("figures");
        assert_eq!(forever.duration_ns, u64::MAX);
        assert_eq!(forever.trusted(u32::MAX), (Some(812), Some(1_500)));
        assert!(Figures::parse("nothing", "read").is_none() && Figures::parse("{}", "read").is_none());
    }

    #[test]
    fn drops_contradictory_latencies() {
        let trusted = |figures: Figures| figures.trusted(4);
        assert_eq!(trusted(FIGURES), (Some(812), Some(1_500)));
        let slow = Figures { mean_ns: 192_000, max_ns: 4_000_000_000, ..FIGURES };
        assert_eq!(trusted(Figures { p99_ns: 3_070_000_000, ..slow }), (Some(192_000), None));
        assert_eq!(trusted(Figures { p99_ns: 19_000_000, ..slow }), (Some(192_000), Some(19_000_000)));
        assert_eq!(trusted(Figures { p99_ns: 2_500, ..FIGURES }), (Some(812), None), "longer than the longest");
        assert_eq!(trusted(Figures { p99_ns: 600, ..FIGURES }), (Some(812), None), "shorter than the shortest");
        assert_eq!(trusted(Figures { mean_ns: 600, ..FIGURES }), (None, None), "the mean is less than the shortest");
        let crowded = Figures { mean_ns: 100_000_000, max_ns: 200_000_000, p99_ns: 150_000_000, ..FIGURES };
        assert_eq!(trusted(crowded), (None, None), "500 requests of 100 ms, 4 at a time, take longer than 2 s");
    }
}
