//! Numbers and times as text for people.

use precast_store::record::{Sizes, bucket_name};

/// Returns bytes with three digits and a binary unit, as `1.24 MiB`.
pub fn bytes(bytes: u64) -> String {
    let mut value = bytes as f64;
    let mut unit = "B";
    for next in ["KiB", "MiB", "GiB", "TiB", "PiB"] {
        if value < 1000.0 {
            break;
        }
        value /= 1024.0;
        unit = next;
    }
    match value {
        _ if unit == "B" => format!("{bytes} B"),
        v if v < 10.0 => format!("{v:.2} {unit}"),
        v if v < 100.0 => format!("{v:.1} {unit}"),
        v => format!("{v:.0} {unit}"),
    }
}

/// Returns seconds with a unit that leaves three digits.
pub fn time(seconds: f64) -> String {
    let digits = |value: f64| match value {
        v if v >= 100.0 => format!("{v:.0}"),
        v if v >= 10.0 => format!("{v:.1}"),
        v => format!("{v:.2}"),
    };
    match seconds {
        s if s <= 0.0 => "0 s".to_owned(),
        s if s < 1e-3 => format!("{} µs", digits(s * 1e6)),
        s if s < 1.0 => format!("{} ms", digits(s * 1e3)),
        s if s < 120.0 => format!("{} s", digits(s)),
        s if s < 7200.0 => format!("{} min", digits(s / 60.0)),
        s => format!("{} h", digits(s / 3600.0)),
    }
}

/// Returns seconds since 1970 as `2026-11-20 19:30 UTC`.
pub fn date(seconds: i64) -> String {
    let (days, rest) = (seconds.div_euclid(86_400), seconds.rem_euclid(86_400));
    // Days since 1 March of the year 0, in eras of 400 years.
    let shifted = days + 719_468;
    let (era, day) = (shifted.div_euclid(146_097), shifted.rem_euclid(146_097));
    let year = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
    let of_year = day - (365 * year + year / 4 - year / 100);
    let month = (5 * of_year + 2) / 153;
    let of_month = of_year - (153 * month + 2) / 5 + 1;
    let (month, carry) = if month < 10 {
        (month + 3, 0)
    } else {
        (month - 9, 1)
    };
    let year = year + era * 400 + carry;
    let (hour, minute) = (rest / 3600, rest / 60 % 60);
    format!("{year:04}-{month:02}-{of_month:02} {hour:02}:{minute:02} UTC")
}

/// Returns the sizes of requests that were counted together, as `batch=1 seq=40`.
pub fn asked(sizes: &Sizes) -> String {
    if sizes.is_empty() {
        return "(many sizes)".to_owned();
    }
    bucket_name(sizes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_have_three_digits() {
        let all: Vec<String> = [0, 999, 1000, 10 << 10, 352_136, 999 << 20, 5 << 40]
            .map(bytes)
            .into();
        assert_eq!(
            all.join(", "),
            "0 B, 999 B, 0.98 KiB, 10.0 KiB, 344 KiB, 999 MiB, 5.00 TiB"
        );
    }

    #[test]
    fn dates_are_right() {
        assert_eq!(date(0), "1970-01-01 00:00 UTC");
        assert_eq!(date(951_782_400), "2000-02-29 00:00 UTC");
        assert_eq!(date(1_795_203_868), "2026-11-20 19:44 UTC");
        assert_eq!(date(-1), "1969-12-31 23:59 UTC");
    }
}
