// SPDX-License-Identifier: MIT OR Apache-2.0
//! Renders the table of `timerlat top`.

use std::io::{self, Write};

use whylate_model::Histogram;

use super::total::{OfCpu, Total};
use super::{Unit, stamp};

/// Largest count of all CPUs that is shown without an exponent.
const LARGEST_MANTISSA: u64 = 999_999;

/// Writes the table of all activations so far. `with_user` adds the columns of the return to user space.
pub fn write(out: &mut dyn Write, total: &Total, unit: Unit, with_user: bool) -> io::Result<()> {
    let kinds = if with_user { 3 } else { 2 };
    let (us, duration) = (unit.short(), stamp(total.duration_ns));
    writeln!(out, "{:37}Timer Latency{:46}{}", "", "", if with_user { " ".repeat(41) } else { String::new() })?;
    write!(out, "{duration:<6}   |          IRQ Timer Latency ({us})        |         Thread Timer Latency ({us})")?;
    writeln!(out, "{}", if with_user { format!("      |    Ret user Timer Latency ({us})") } else { String::new() })?;
    writeln!(out, "CPU COUNT      {}", ["|      cur       min       avg       max"; 3][..kinds].join(" "))?;
    for (cpu, of_cpu) in &total.cpus {
        row(out, *cpu, of_cpu, unit, kinds)?;
    }
    writeln!(out, "---------------{}", ["|---------------------------------------"; 3][..kinds].join("-"))?;
    let all = total.all();
    let (mantissa, exponent) = shortened(all.count());
    let columns = all.latencies.iter().take(kinds).map(|latencies| {
        let figures = [latencies.min_ns(), latencies.mean_ns(), latencies.max_ns()];
        format!("|          {}", cells(latencies, &figures, unit))
    });
    writeln!(out, "ALL #{mantissa:<6} e{exponent} {}", columns.collect::<Vec<_>>().join(" "))
}

fn row(out: &mut dyn Write, cpu: u32, of_cpu: &OfCpu, unit: Unit, kinds: usize) -> io::Result<()> {
    let count = of_cpu.count();
    if count == 0 {
        return Ok(());
    }
    let columns = of_cpu.latencies.iter().zip(of_cpu.last_ns).take(kinds).map(|(latencies, last_ns)| {
        let figures = [last_ns, latencies.min_ns(), latencies.mean_ns(), latencies.max_ns()];
        format!("|{}", cells(latencies, &figures, unit))
    });
    writeln!(out, "{cpu:3} #{count:<9} {}", columns.collect::<Vec<_>>().join(" "))
}

fn cells(latencies: &Histogram, figures_ns: &[u64], unit: Unit) -> String {
    let cell = |ns: &u64| if latencies.is_empty() { format!("{:>9}", "-") } else { format!("{:9}", ns / unit.ns()) };
    figures_ns.iter().map(cell).collect::<Vec<_>>().join(" ")
}

/// Returns mantissa and decimal exponent of a count, as rtla prints large ones.
fn shortened(mut count: u64) -> (u64, u32) {
    let mut exponent = 0;
    while count > LARGEST_MANTISSA {
        count /= 10;
        exponent += 1;
    }
    (count, exponent)
}

#[cfg(test)]
mod tests {
    use super::super::total::sample;
    use super::*;

    fn written(unit: Unit, with_user: bool) -> String {
        crate::render::text::text_of(|out| write(out, &sample::total(), unit, with_user))
    }

    #[test]
    fn the_table_is_rtlas() {
        insta::assert_snapshot!(written(Unit::Microseconds, true));
    }

    #[test]
    fn kernel_threads_do_not_return_to_user_space_and_nanoseconds_are_shown_whole() {
        insta::assert_snapshot!(written(Unit::Nanoseconds, false));
    }

    #[test]
    fn large_counts_have_an_exponent() {
        assert_eq!(shortened(999_999), (999_999, 0));
        assert_eq!(shortened(12_345_678), (123_456, 2));
    }
}
