//! Formats of numbers, times and untrusted text.

use std::{
    fmt::Display,
    time::{SystemTime, UNIX_EPOCH},
};

pub(super) use crate::inspect::words::bytes;

/// Returns the seconds since 1970 now.
pub(super) fn now() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| since.as_secs() as i64)
}

/// Returns the time since `then` as `5m` or `3d`; empty for none.
pub(super) fn age(then: impl Into<Option<i64>>) -> String {
    then.into()
        .map_or_else(String::new, |then| ago(now(), then))
}

fn ago(now: i64, then: i64) -> String {
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
/// and tabs are kept.
pub(super) fn plain(text: &str) -> String {
    let mut plain = String::with_capacity(text.len());
    for c in text.chars() {
        // Marks of direction can hide the real spelling of a name.
        let bidi = matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
        match c {
            '\n' | '\t' => plain.push(c),
            c if c.is_control() || bidi => plain.extend(c.escape_default()),
            c => plain.push(c),
        }
    }
    plain
}

/// Returns text whose lines fit a terminal of this width. They are broken between words; a digest on a line that is too
/// long is cut to an ID. In a text of several lines, lines indented by four spaces are code and are kept.
pub(super) fn wrap(text: &str, width: Option<usize>) -> String {
    let Some(width @ MIN_WIDTH..) = width else {
        return text.to_owned();
    };
    let several = text.trim().contains('\n');
    let code = |line: &str| several && line.starts_with("    ") && !line.starts_with("     ");
    let lines = text.split('\n').map(|line| {
        if code(line) {
            line.to_owned()
        } else {
            fit(line, width)
        }
    });
    lines.collect::<Vec<_>>().join("\n")
}

/// On a narrower terminal nothing is broken.
const MIN_WIDTH: usize = 20;

fn fit(line: &str, width: usize) -> String {
    let fits = |line: &str| textwrap::core::display_width(line) <= width;
    let line = if fits(line) {
        return line.to_owned();
    } else {
        short_digests(line)
    };
    if fits(&line) {
        return line;
    }
    // The vertical line of a drawing continues.
    let drawn = |c: &char| " ├└─│".contains(*c);
    let rail = line.chars().take_while(drawn).map(|c| match c {
        '├' | '│' => '│',
        _ => ' ',
    });
    let indent: String = rail.chain("  ".chars()).collect();
    let options = textwrap::Options::new(width)
        .subsequent_indent(&indent)
        .word_separator(textwrap::WordSeparator::AsciiSpace)
        .word_splitter(textwrap::WordSplitter::NoHyphenation)
        .break_words(false);
    textwrap::fill(&line, options)
}

/// Cuts every digest to its first digits.
fn short_digests(line: &str) -> String {
    const DIGITS: usize = 64;
    const SHORT: usize = 12;
    let hex = |c: char| c.is_ascii_hexdigit();
    let mut short = String::new();
    for part in line.split_inclusive(|c| !hex(c)) {
        let digits = part.trim_end_matches(|c| !hex(c)).len();
        match digits {
            DIGITS => short.extend([&part[..SHORT], &part[DIGITS..]]),
            _ => short.push_str(part),
        }
    }
    short
}

/// Returns `1 program` or `3 programs`.
pub(super) fn count<N: Display + PartialEq + From<u8>>(number: N, noun: &str) -> String {
    let plural = if number == N::from(1) { "" } else { "s" };
    format!("{number} {noun}{plural}")
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
    fn lines_break_between_words_and_rails_go_on() {
        let digest = "0eead197b741ad7e7fb70a97bdbfd7f17b77f0eb89f8866c2062922ac22853a2";
        let code = "a = one + two + three + four + five + six";
        let text = format!(
            "program \x1b[2m{digest}\x1b[0m\n ├─ head  (input_ids) → (%1: float32[1, 32, 8])\n └─ tail  (input_ids) → (%1: \
             float32[1, 32, 8])\n  hint: say what to do next, once-and-for-all\n    {code}\nshort"
        );
        insta::assert_snapshot!(wrap(&text, Some(30)).replace('\x1b', "␛"), @"
        program ␛[2m0eead197b741␛[0m
         ├─ head  (input_ids) → (%1:
         │    float32[1, 32, 8])
         └─ tail  (input_ids) → (%1:
              float32[1, 32, 8])
          hint: say what to do next,
            once-and-for-all
            a = one + two + three + four + five + six
        short
        ");
        for columns in [None, Some(10), Some(200)] {
            assert_eq!(wrap(&text, columns), text);
        }
        let word = "no-break/at/all/in/one/word";
        assert_eq!(wrap(word, Some(20)), word);
    }

    #[test]
    fn no_text_reaches_the_terminals_state() {
        let shown = "a\\u{1b}[2Jb\tc\n\\u{202e}d\\r";
        assert_eq!(plain("a\x1b[2Jb\tc\n\u{202e}d\r"), shown);
    }
}
