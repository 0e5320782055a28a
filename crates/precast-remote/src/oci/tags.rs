//! The tags of releases, from which model and number can be read.

use crate::error::RemoteError;

/// Returns the tag of a release: `minilm-r7`. Letters that a tag can't have are written as `_` with two hex digits for each
/// byte, `_` itself as `__`.
pub fn tag_of(model: &str, seq: u64) -> Result<String, RemoteError> {
    const LONGEST: usize = 128;
    let mut tag = String::new();
    for byte in model.bytes() {
        match byte {
            b'_' => tag.push_str("__"),
            // A tag begins with neither.
            b'.' | b'-' if tag.is_empty() => tag.push_str(&format!("_{byte:02X}")),
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'.' | b'-' => tag.push(char::from(byte)),
            _ => tag.push_str(&format!("_{byte:02X}")),
        }
    }
    tag.push_str(&format!("-r{seq}"));
    if tag.len() > LONGEST {
        return Err(RemoteError::Storage {
            what: "name a release of",
            name: model.to_owned(),
            why: format!("a tag has at most {LONGEST} letters, and this one would be `{tag}`"),
        });
    }
    Ok(tag)
}

/// Returns model and number of the release whose tag this is; none for other tags.
pub fn release_of(tag: &str) -> Option<(String, u64)> {
    let (model, seq) = tag.rsplit_once("-r")?;
    let seq = seq.parse().ok()?;
    let (mut name, mut rest) = (Vec::new(), model.as_bytes());
    while let Some((&byte, more)) = rest.split_first() {
        rest = more;
        if byte != b'_' {
            name.push(byte);
        } else if let Some(more) = rest.strip_prefix(b"_") {
            name.push(b'_');
            rest = more;
        } else {
            let (hex, more) = rest.split_at_checked(2)?;
            name.push(u8::from_str_radix(std::str::from_utf8(hex).ok()?, 16).ok()?);
            rest = more;
        }
    }
    let name = String::from_utf8(name).ok()?;
    (tag_of(&name, seq).ok()? == tag).then_some((name, seq))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that fails panics")]

    use super::*;

    #[test]
    fn tags_are_those_of_one_release() {
        for (model, tag) in [
            ("minilm", "minilm-r7"),
            ("my_model", "my__model-r7"),
            ("bert-base.v1", "bert-base.v1-r7"),
            ("-m-r1", "_2Dm-r1-r7"),
            ("org/modèle 1", "org_2Fmod_C3_A8le_201-r7"),
        ] {
            assert_eq!(tag_of(model, 7).unwrap(), tag);
            assert_eq!(release_of(tag), Some((model.to_owned(), 7)));
        }
        for foreign in [
            "latest", "v1.0", "m-r", "m-r01", "m-r-1", "m_-r1", "m_2f-r1", "m_61-r1",
        ] {
            assert_eq!(release_of(foreign), None, "{foreign}");
        }
        let long = tag_of(&"é".repeat(50), 1).unwrap_err().to_string();
        assert!(long.contains("at most 128 letters"), "{long}");
    }
}
