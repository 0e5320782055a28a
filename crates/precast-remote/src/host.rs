//! Hosts that are this machine: plain HTTP is for them alone.

use url::{Host, Url};

/// Returns whether a URL names this machine.
pub fn is_local(url: &str) -> bool {
    let Ok(url) = Url::parse(url) else {
        return false;
    };
    match url.host() {
        Some(Host::Domain(name)) => name == "localhost",
        Some(Host::Ipv4(address)) => address.is_loopback(),
        Some(Host::Ipv6(address)) => address.is_loopback(),
        None => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_this_machine_is_local() {
        for url in [
            "http://localhost:80",
            "http://127.0.0.1",
            "http://[::1]:8000",
        ] {
            assert!(is_local(url), "{url}");
        }
        for url in ["http://10.0.0.1", "http://localhost.example.org", "x", ""] {
            assert!(!is_local(url), "{url}");
        }
    }
}
