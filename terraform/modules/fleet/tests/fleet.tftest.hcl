# What went wrong before: hours of debugging on hosts that could never have worked, and plans that made no host at all.

variables {
  name          = "t"
  provider_name = "aws"
  zone          = "us-west-2b"
  transport     = { library = "mooncake", protocol = "efa" }
  members = {
    decode  = { role = "decode", shape = "p6-b200.48xlarge", count = 2, reservation = "b200" }
    prefill = { role = "prefill", shape = "p5en.48xlarge", reservation = "h200" }
    router  = { role = "router", shape = "c7i.4xlarge", also = ["ingress"] }
  }
  reservations = {
    b200 = { id = "cr-1", zone = "us-west-2b", shape = "p6-b200.48xlarge", count = 2, ends_at = "2099-01-01T00:00:00Z" }
    h200 = { id = "cr-2", zone = "us-west-2b", shape = "p5en.48xlarge", count = 1 }
  }
  networks = {
    "network.host_cidr"    = { cidr = "10.0.0.0/24", hosts = 4 }
    "network.ingress_cidr" = { cidr = "10.0.1.0/24" }
  }
  access = {
    ssh_keys        = ["ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIGV4YW1wbGVleGFtcGxlZXhhbXBsZWV4YW1wbGVleA ops"]
    allowed_clients = ["198.51.100.0/24"]
    admin_clients   = []
  }
}

# --- Valid

run "pools_become_hosts" {
  command = plan
  assert {
    condition     = jsonencode(keys(output.hosts)) == jsonencode(["t-decode-1", "t-decode-2", "t-prefill-1", "t-router-1"])
    error_message = jsonencode(keys(output.hosts))
  }
  assert {
    condition     = output.hosts["t-decode-2"].gpus == 8 && output.hosts["t-decode-2"].index == 1
    error_message = jsonencode(output.hosts["t-decode-2"])
  }
}

run "b200_prefills_too" {
  command = plan
  variables {
    members = {
      decode  = { role = "decode", shape = "p6-b200.48xlarge", count = 1, reservation = "b200" }
      prefill = { role = "prefill", shape = "p6-b200.48xlarge", count = 1, reservation = "b200" }
      router  = { role = "router", shape = "c7i.4xlarge", also = ["ingress"] }
    }
  }
  assert {
    condition     = length(output.hosts) == 3
    error_message = "one reservation may serve two pools"
  }
}

run "infiniband_takes_verbs" {
  command = plan
  variables {
    provider_name = "onprem"
    zone          = "row-3"
    reservations  = {}
    transport     = { library = "nixl", protocol = "UCX" }
    members = {
      decode  = { role = "decode", shape = "hgx-b200-infiniband" }
      prefill = { role = "prefill", shape = "hgx-h100-infiniband" }
      router  = { role = "router", shape = "cpu-server", also = ["ingress"] }
    }
  }
  assert {
    condition     = length(output.hosts) == 3
    error_message = "on-premises hosts need no reservation"
  }
}

run "cost_adds_up" {
  command = plan
  variables {
    prices = {
      "p6-b200.48xlarge" = { usd_per_hour = 100, as_of = "2026-01-01", source = "test" }
      "c7i.4xlarge"      = { usd_per_hour = 0.5, as_of = "2026-01-01", source = "test" }
    }
  }
  assert {
    condition     = output.hourly_cost.known == 200.5 + module.catalog.prices["p5en.48xlarge"].usd_per_hour && length(output.hourly_cost.without_price) == 0
    error_message = jsonencode(output.hourly_cost)
  }
}

run "a_list_price_is_named_with_its_day_and_source" {
  command = plan
  assert {
    condition     = jsonencode(output.hourly_cost.without_price) == jsonencode(["c7i.4xlarge"]) && output.hourly_cost.figures["p6-b200.48xlarge"] == module.catalog.prices["p6-b200.48xlarge"]
    error_message = jsonencode(output.hourly_cost)
  }
}

run "parts_lie_in_their_whole" {
  command = plan
  variables {
    networks = { vpc = { cidr = "10.80.0.0/16" }, a = { cidr = "10.80.0.0/20", within = "vpc" }, b = { cidr = "10.80.16.0/24", within = "vpc" }, peer = { cidr = "10.81.0.0/16" } }
  }
  assert {
    condition     = length(output.hosts) > 0
    error_message = "a part does not overlap its own whole"
  }
}

# --- Invalid, one thing at a time

run "a_peer_overlaps_the_whole" {
  command = plan
  variables {
    networks = { vpc = { cidr = "10.80.0.0/16" }, a = { cidr = "10.80.0.0/20", within = "vpc" }, peer = { cidr = "10.80.128.0/20" } }
  }
  expect_failures = [var.networks]
}

run "parts_overlap" {
  command = plan
  variables {
    networks = { vpc = { cidr = "10.80.0.0/16" }, a = { cidr = "10.80.0.0/20", within = "vpc" }, b = { cidr = "10.80.8.0/24", within = "vpc" } }
  }
  expect_failures = [var.networks]
}

run "a_part_outside_of_its_whole" {
  command = plan
  variables {
    networks = { vpc = { cidr = "10.80.0.0/16" }, a = { cidr = "10.81.0.0/20", within = "vpc" } }
  }
  expect_failures = [var.networks]
}

run "reservation_ends_within_a_day" {
  command = plan
  variables {
    reservations = { b200 = { id = "cr-0123456789abcdef0", zone = "us-west-2b", shape = "p6-b200.48xlarge", count = 2, ends_at = timeadd(timestamp(), "1h") }, h200 = { id = "cr-0fedcba9876543210", zone = "us-west-2b", shape = "p5en.48xlarge", count = 1 } }
  }
  expect_failures = [check.reservation_lasts_a_day]
}

run "name_too_long" {
  command = plan
  variables {
    name = "a-name-that-is-far-too-long-for-clouds"
  }
  expect_failures = [var.name]
}

run "unknown_provider" {
  command = plan
  variables {
    provider_name = "azure"
  }
  expect_failures = [var.provider_name]
}

run "decode_on_hopper" {
  command = plan
  variables {
    members = {
      decode  = { role = "decode", shape = "p5en.48xlarge", reservation = "h200" }
      prefill = { role = "prefill", shape = "p6-b200.48xlarge", reservation = "b200" }
      router  = { role = "router", shape = "c7i.4xlarge", also = ["ingress"] }
    }
  }
  expect_failures = [var.members]
}

run "decode_without_gpu" {
  command = plan
  variables {
    members = {
      decode  = { role = "decode", shape = "c7i.4xlarge" }
      prefill = { role = "prefill", shape = "p5en.48xlarge", reservation = "h200" }
      router  = { role = "router", shape = "c7i.4xlarge", also = ["ingress"] }
    }
  }
  expect_failures = [var.members]
}

run "prefill_without_gpu" {
  command = plan
  variables {
    members = {
      decode  = { role = "decode", shape = "p6-b200.48xlarge", count = 2, reservation = "b200" }
      prefill = { role = "prefill", shape = "c7i.4xlarge" }
      router  = { role = "router", shape = "c7i.4xlarge", also = ["ingress"] }
    }
  }
  expect_failures = [var.members]
}

run "no_decode_pool" {
  command = plan
  variables {
    members = {
      prefill = { role = "prefill", shape = "p5en.48xlarge", reservation = "h200" }
      router  = { role = "router", shape = "c7i.4xlarge", also = ["ingress"] }
    }
  }
  expect_failures = [var.members]
}

run "no_router_pool" {
  command = plan
  variables {
    members = {
      decode  = { role = "decode", shape = "p6-b200.48xlarge", count = 2, reservation = "b200" }
      prefill = { role = "prefill", shape = "p5en.48xlarge", reservation = "h200" }
    }
  }
  expect_failures = [var.members]
}

run "unknown_role" {
  command = plan
  variables {
    members = {
      decode  = { role = "decode", shape = "p6-b200.48xlarge", count = 2, reservation = "b200" }
      prefill = { role = "prefill", shape = "p5en.48xlarge", reservation = "h200" }
      router  = { role = "gateway", shape = "c7i.4xlarge", also = ["ingress"] }
    }
  }
  expect_failures = [var.members]
}

run "unknown_shape" {
  command = plan
  variables {
    members = {
      decode  = { role = "decode", shape = "p6-b200.96xlarge", reservation = "b200" }
      prefill = { role = "prefill", shape = "p5en.48xlarge", reservation = "h200" }
      router  = { role = "router", shape = "c7i.4xlarge", also = ["ingress"] }
    }
  }
  expect_failures = [var.members]
}

run "shape_of_another_cloud" {
  command = plan
  variables {
    members = {
      decode  = { role = "decode", shape = "a4-highgpu-8g", reservation = "b200" }
      prefill = { role = "prefill", shape = "p5en.48xlarge", reservation = "h200" }
      router  = { role = "router", shape = "c7i.4xlarge", also = ["ingress"] }
    }
  }
  expect_failures = [var.members]
}

run "half_a_host" {
  command = plan
  variables {
    members = {
      decode  = { role = "decode", shape = "p6-b200.48xlarge", count = 1.5, reservation = "b200" }
      prefill = { role = "prefill", shape = "p5en.48xlarge", reservation = "h200" }
      router  = { role = "router", shape = "c7i.4xlarge", also = ["ingress"] }
    }
  }
  expect_failures = [var.members]
}

run "no_host" {
  command = plan
  variables {
    members = {
      decode  = { role = "decode", shape = "p6-b200.48xlarge", count = 0, reservation = "b200" }
      prefill = { role = "prefill", shape = "p5en.48xlarge", reservation = "h200" }
      router  = { role = "router", shape = "c7i.4xlarge", also = ["ingress"] }
    }
  }
  expect_failures = [var.members]
}

run "no_ingress" {
  command = plan
  variables {
    members = {
      decode  = { role = "decode", shape = "p6-b200.48xlarge", count = 2, reservation = "b200" }
      prefill = { role = "prefill", shape = "p5en.48xlarge", reservation = "h200" }
      router  = { role = "router", shape = "c7i.4xlarge" }
    }
  }
  expect_failures = [var.members]
}

run "ingress_on_a_gpu_host" {
  command = plan
  variables {
    members = {
      decode  = { role = "decode", shape = "p6-b200.48xlarge", count = 2, reservation = "b200" }
      prefill = { role = "prefill", shape = "p5en.48xlarge", reservation = "h200", also = ["ingress"] }
      router  = { role = "router", shape = "c7i.4xlarge", also = ["ingress"] }
    }
  }
  expect_failures = [var.members]
}

run "pool_name_not_a_host_name" {
  command = plan
  variables {
    members = {
      "Decode 1" = { role = "decode", shape = "p6-b200.48xlarge", count = 2, reservation = "b200" }
      prefill    = { role = "prefill", shape = "p5en.48xlarge", reservation = "h200" }
      router     = { role = "router", shape = "c7i.4xlarge", also = ["ingress"] }
    }
  }
  expect_failures = [var.members]
}

run "two_fabrics" {
  command = plan
  variables {
    provider_name = "onprem"
    reservations  = {}
    transport     = { library = "mooncake", protocol = "rdma" }
    members = {
      decode  = { role = "decode", shape = "hgx-b200-infiniband" }
      prefill = { role = "prefill", shape = "hgx-h200-roce" }
      router  = { role = "router", shape = "cpu-server", also = ["ingress"] }
    }
  }
  expect_failures = [var.members]
}

run "reservation_missing" {
  command = plan
  variables {
    members = {
      decode  = { role = "decode", shape = "p6-b200.48xlarge", reservation = "b2000" }
      prefill = { role = "prefill", shape = "p5en.48xlarge", reservation = "h200" }
      router  = { role = "router", shape = "c7i.4xlarge", also = ["ingress"] }
    }
  }
  expect_failures = [var.members]
}

run "no_reservation" {
  command = plan
  variables {
    members = {
      decode  = { role = "decode", shape = "p6-b200.48xlarge" }
      prefill = { role = "prefill", shape = "p5en.48xlarge", reservation = "h200" }
      router  = { role = "router", shape = "c7i.4xlarge", also = ["ingress"] }
    }
  }
  expect_failures = [var.members]
}

run "reservation_of_another_shape" {
  command = plan
  variables {
    members = {
      decode  = { role = "decode", shape = "p6-b200.48xlarge", reservation = "h200" }
      prefill = { role = "prefill", shape = "p6-b200.48xlarge", reservation = "b200" }
      router  = { role = "router", shape = "c7i.4xlarge", also = ["ingress"] }
    }
  }
  expect_failures = [var.members]
}

run "more_hosts_than_reserved" {
  command = plan
  variables {
    members = {
      decode  = { role = "decode", shape = "p6-b200.48xlarge", count = 3, reservation = "b200" }
      prefill = { role = "prefill", shape = "p5en.48xlarge", reservation = "h200" }
      router  = { role = "router", shape = "c7i.4xlarge", also = ["ingress"] }
    }
  }
  expect_failures = [var.members]
}

run "reservation_in_another_zone" {
  command = plan
  variables {
    reservations = {
      b200 = { id = "cr-1", zone = "us-west-2c", shape = "p6-b200.48xlarge", count = 2 }
      h200 = { id = "cr-2", zone = "us-west-2b", shape = "p5en.48xlarge", count = 1 }
    }
  }
  expect_failures = [var.reservations]
}

run "reservation_has_ended" {
  command = plan
  variables {
    reservations = {
      b200 = { id = "cr-1", zone = "us-west-2b", shape = "p6-b200.48xlarge", count = 2, ends_at = "2024-01-01T00:00:00Z" }
      h200 = { id = "cr-2", zone = "us-west-2b", shape = "p5en.48xlarge", count = 1 }
    }
  }
  expect_failures = [var.reservations]
}

run "reservation_end_is_no_time" {
  command = plan
  variables {
    reservations = {
      b200 = { id = "cr-1", zone = "us-west-2b", shape = "p6-b200.48xlarge", count = 2, ends_at = "next week" }
      h200 = { id = "cr-2", zone = "us-west-2b", shape = "p5en.48xlarge", count = 1 }
    }
  }
  expect_failures = [var.reservations]
}

run "reservation_without_id" {
  command = plan
  variables {
    reservations = {
      b200 = { id = " ", zone = "us-west-2b", shape = "p6-b200.48xlarge", count = 2 }
      h200 = { id = "cr-2", zone = "us-west-2b", shape = "p5en.48xlarge", count = 1 }
    }
  }
  expect_failures = [var.reservations]
}

run "mooncake_verbs_on_efa" {
  command = plan
  variables {
    transport = { library = "mooncake", protocol = "rdma" }
  }
  expect_failures = [var.transport]
}

run "ucx_on_efa" {
  command = plan
  variables {
    transport = { library = "nixl", protocol = "UCX" }
  }
  expect_failures = [var.transport]
}

run "tcp_between_gpu_hosts" {
  command = plan
  variables {
    transport = { library = "mooncake", protocol = "tcp" }
  }
  expect_failures = [var.transport]
}

run "unknown_transport" {
  command = plan
  variables {
    transport = { library = "nccl", protocol = "rdma" }
  }
  expect_failures = [var.transport]
}

run "overlapping_networks" {
  command = plan
  variables {
    networks = { "network.host_cidr" = { cidr = "10.0.0.0/16" }, "network.peers.office" = { cidr = "10.0.200.0/24" } }
  }
  expect_failures = [var.networks]
}

run "network_is_a_host_address" {
  command = plan
  variables {
    networks = { "network.host_cidr" = { cidr = "10.0.0.1/24" } }
  }
  expect_failures = [var.networks]
}

run "network_too_small" {
  command = plan
  variables {
    networks = { "network.host_cidr" = { cidr = "10.0.0.0/29", hosts = 4 } }
  }
  expect_failures = [var.networks]
}

run "private_ssh_key" {
  command = plan
  variables {
    access = { ssh_keys = ["-----BEGIN OPENSSH PRIVATE KEY-----"], allowed_clients = [], admin_clients = [] }
  }
  expect_failures = [var.access]
}

run "client_is_a_name" {
  command = plan
  variables {
    access = { ssh_keys = [], allowed_clients = ["example.com"], admin_clients = [] }
  }
  expect_failures = [var.access]
}

run "ssh_from_everywhere" {
  command = plan
  variables {
    access = { ssh_keys = [], allowed_clients = [], admin_clients = ["0.0.0.0/0"] }
  }
  expect_failures = [var.access]
}

run "price_without_a_day" {
  command = plan
  variables {
    prices = { "c7i.4xlarge" = { usd_per_hour = 1, as_of = "last year", source = "x" } }
  }
  expect_failures = [var.prices]
}

run "zone_that_does_not_offer_the_shape" {
  command = plan
  variables {
    zone = "eu-north-1a"
    reservations = {
      b200 = { id = "cr-1", zone = "eu-north-1a", shape = "p6-b200.48xlarge", count = 2 }
      h200 = { id = "cr-2", zone = "eu-north-1a", shape = "p5en.48xlarge", count = 1 }
    }
  }
  expect_failures = [check.shape_is_offered_in_zone]
}
