//! What a call of each program costs: measured here, or else where it was built.
//!
//! A build's gate measured every program's artifacts and its exported graph by turns; the figures are in its receipt. While it runs,
//! the runtime measures a sample of the calls on the CPU (a CUDA call returns before it is done) and keeps a moving
//! mean. Both are costs of the same thing in different circumstances, so what was measured here counts first, and
//! receipts are scaled to it for programs that had no calls yet.

use precast_store::record::Sizes;

use super::{layout::volume, loader::Slot};

/// One program, as far as its cost goes.
struct Known<'a> {
    sizes: &'a Sizes,
    /// Measured here, in seconds.
    measured: Option<f64>,
    receipt: Option<f64>,
    volume: f64,
}

/// Returns what a call of each program costs, in one unit for all of them.
pub(super) fn costs(programs: &[&Slot]) -> Vec<f64> {
    let known = programs.iter().map(|slot| Known {
        sizes: &slot.program.sizes,
        measured: slot.counters.measured(),
        receipt: slot.program.seconds(slot.is_eager()),
        volume: volume(&slot.program) as f64,
    });
    let known: Vec<Known> = known.collect();
    judge(&known)
}

/// What this process measured counts first. For programs it has not measured, the receipts of the gate's runs are
/// scaled to it, or, where a receipt is missing, the number of input elements is. A bucket never costs more than one
/// that covers it: a measurement that says otherwise is noise, and would send requests to the larger one.
fn judge(programs: &[Known<'_>]) -> Vec<f64> {
    let receipts: Option<Vec<f64>> = programs.iter().map(|known| known.receipt).collect();
    let base = receipts.unwrap_or_else(|| programs.iter().map(|known| known.volume).collect());
    let ratios: Vec<f64> = programs
        .iter()
        .zip(&base)
        .filter_map(|(known, b)| known.measured.map(|m| m / b.max(f64::MIN_POSITIVE)))
        .collect();
    let scale = match ratios.is_empty() {
        true => 1.0,
        false => ratios.iter().sum::<f64>() / ratios.len() as f64,
    };
    let raw: Vec<f64> = programs
        .iter()
        .zip(&base)
        .map(|(known, b)| known.measured.unwrap_or(b * scale))
        .collect();
    let covers = |a: &Sizes, b: &Sizes| a.values().zip(b.values()).all(|(a, b)| a >= b);
    let cheapest = |small: &Known| {
        let covering = programs
            .iter()
            .zip(&raw)
            .filter(|(large, _)| covers(large.sizes, small.sizes));
        covering
            .map(|(_, &cost)| cost)
            .fold(f64::INFINITY, f64::min)
    };
    programs.iter().map(cheapest).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn judged(rows: &[(i64, Option<f64>, Option<f64>)]) -> Vec<f64> {
        let sizes: Vec<Sizes> = rows
            .iter()
            .map(|(n, ..)| Sizes::from([("n".to_owned(), *n)]))
            .collect();
        let known: Vec<Known> = rows
            .iter()
            .zip(&sizes)
            .map(|((n, measured, receipt), sizes)| Known {
                sizes,
                measured: *measured,
                receipt: *receipt,
                volume: *n as f64,
            })
            .collect();
        judge(&known)
    }

    #[test]
    fn receipts_are_scaled_to_what_was_measured_here() {
        // Twice as slow here as where it was built, so the other is taken to be as well.
        assert_eq!(
            judged(&[(1, Some(2e-3), Some(1e-3)), (8, None, Some(4e-3))]),
            [2e-3, 8e-3]
        );
        assert_eq!(
            judged(&[(1, None, Some(1e-3)), (8, None, Some(4e-3))]),
            [1e-3, 4e-3]
        );
    }

    #[test]
    fn without_every_receipt_the_number_of_elements_counts() {
        assert_eq!(
            judged(&[(1, None, None), (8, None, Some(4e-3))]),
            [1.0, 8.0]
        );
        assert_eq!(
            judged(&[(2, Some(1e-3), None), (8, None, None)]),
            [1e-3, 4e-3]
        );
    }

    #[test]
    fn a_bucket_never_costs_more_than_one_that_covers_it() {
        assert_eq!(
            judged(&[(1, Some(9e-3), Some(1e-3)), (8, Some(4e-3), Some(4e-3))]),
            [4e-3, 4e-3]
        );
    }
}
