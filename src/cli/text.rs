//! Formats of numbers, times and untrusted text.

use std::time::{SystemTime, UNIX_EPOCH};

pub(super) use crate::inspect::words::bytes;

/// Returns the seconds since 1970 now.
pub(super) fn now() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| since.as_secs() as i64)
}

/// Returns how long ago `then` was, in one unit, as `5m` or `3d`.
pub(super) fn ago(now: i64, then: i64) -> String {
    match now.saturating_sub(then).max(0) {
        s @ ..=119 => format!("{s}s"),
        s @ ..=7_199 => format!("{}m", s / 60),
        s @ ..=172_799 => format!("{}h", s / 3_600),
        s => format!("{}d", s / 86_400),
    }
}

/// Parses `90s`, `15m`, `12h`, `30d` or `8w` into seconds.
pub(super) fn duration(text: &str) -> Result<i64, String> {
    let wrong = || "expected a number and a unit, as `90s`, `15m`, `12h`, `30d` or `8w`".to_owned();
    let unit = text.chars().last().ok_or_else(wrong)?;
    let factor = match unit {
        's' => 1,
        'm' => 60,
        'h' => 3_600,
        'd' => 86_400,
        'w' => 604_800,
        _ => return Err(wrong()),
    };
    let number: u32 = text[..text.len() - 1].parse().map_err(|_| wrong())?;
    Ok(i64::from(number) * factor)
}

/// Returns `text` with every character that could move a terminal's cursor or change its state made visible. Line ends
/// and tabs stay.
pub(super) fn plain(text: &str) -> String {
    let mut plain = String::with_capacity(text.len());
    for c in text.chars() {
        // Directions of text can hide what a name really is.
        let bidi = matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
        match c {
            '\n' | '\t' => plain.push(c),
            c if c.is_control() || bidi => plain.extend(c.escape_default()),
            c => plain.push(c),
        }
    }
    plain
}

/// Returns `1 program` or `3 programs`.
pub(super) fn count(number: u64, noun: &str) -> String {
    format!("{number} {noun}{}", if number == 1 { "" } else { "s" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_read_well() {
        let all: Vec<String> = [0, 119, 120, 7199, 7200, 172_800, -5]
            .map(|s| ago(s, 0))
            .into();
        assert_eq!(all.join(", "), "0s, 119s, 2m, 119m, 2h, 2d, 0s");
    }

    #[test]
    fn durations_need_a_unit() {
        assert_eq!(duration("90s"), Ok(90));
        assert_eq!(duration("2w"), Ok(1_209_600));
        for wrong in ["", "d", "5", "-3d", "1y", "1é", "99999999999d"] {
            assert!(duration(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn no_text_reaches_the_terminals_state() {
        assert_eq!(
            plain("a\x1b[2Jb\tc\n\u{202e}d\r"),
            "a\\u{1b}[2Jb\tc\n\\u{202e}d\\r"
        );
    }
}
