//! What an answer of a Hub says, and what an error of a connection says.

use futures_util::StreamExt;
use reqwest::{Response, StatusCode, header::HeaderMap};

/// Returns whether another try can have another answer.
pub fn passes(status: StatusCode) -> bool {
    matches!(status.as_u16(), 408 | 429 | 500 | 502 | 503 | 504)
}

/// Returns how many seconds the Hub asks to wait: in `Retry-After`, or as `"api";r=0;t=55` in `RateLimit`.
pub fn asked_wait(headers: &HeaderMap) -> Option<u64> {
    let text = |name: &str| headers.get(name)?.to_str().ok();
    let after = text("retry-after").and_then(|after| after.trim().parse().ok());
    after.or_else(|| {
        let fields = text("ratelimit")?.split(';').map(str::trim);
        let reset = fields.filter_map(|field| field.strip_prefix("t=")).next();
        reset?.parse().ok()
    })
}

/// Returns what an error of the client says, with its causes, without URLs: their queries are secrets.
pub fn said(error: &reqwest::Error) -> String {
    let kind = match error {
        e if e.is_connect() => "no connection",
        e if e.is_timeout() => "no answer in time",
        _ => "the connection broke",
    };
    let mut text = kind.to_owned();
    let mut cause = std::error::Error::source(error);
    while let Some(next) = cause {
        text = format!("{text}: {next}");
        cause = next.source();
    }
    text
}

/// Reads an answer of at most `most` bytes.
pub async fn whole(answer: Response, most: usize) -> Result<Vec<u8>, String> {
    let (mut text, mut stream) = (Vec::new(), answer.bytes_stream());
    while let Some(chunk) = stream.next().await {
        text.extend_from_slice(&chunk.map_err(|e| said(&e))?);
        if text.len() > most {
            return Err(format!("the answer has more than {most} bytes"));
        }
    }
    Ok(text)
}

/// Returns what a Hub says about an error: a field of a document, or a short text.
pub async fn why(answer: Response) -> String {
    let text = whole(answer, 1 << 16).await.unwrap_or_default();
    let document: Option<serde_json::Value> = serde_json::from_slice(&text).ok();
    let field = document.as_ref().and_then(|document| {
        let fields = ["error", "message"].into_iter();
        fields
            .filter_map(|field| document.get(field)?.as_str())
            .next()
    });
    let text = String::from_utf8_lossy(&text);
    field.unwrap_or(&text).chars().take(300).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_busy_hub_says_how_long() {
        for (name, value, expected) in [
            ("retry-after", "17", Some(17)),
            ("ratelimit", "\"api\";r=0;t=55", Some(55)),
            ("retry-after", "Wed, 21 Oct 2015 07:28:00 GMT", None),
            ("ratelimit", "x", None),
        ] {
            let mut headers = HeaderMap::new();
            headers.insert(name, value.parse().unwrap());
            assert_eq!(asked_wait(&headers), expected, "{value}");
        }
    }
}
