# The root passes everything through and adds nothing of its own but the provider.

mock_provider "aws" {
  mock_data "aws_ec2_instance_type" {
    defaults = { efa_maximum_interfaces = 32 }
  }
}

variables {
  name = "t"
  zone = "us-west-2b"
  pools = {
    decode  = { role = "decode", shape = "p6-b200.48xlarge", count = 2, reservation = "b200" }
    prefill = { role = "prefill", shape = "p5en.48xlarge", reservation = "h200" }
    router  = { role = "router", shape = "c7i.4xlarge", also = ["ingress"] }
  }
  reservations = {
    b200 = { id = "cr-0123456789abcdef0", kind = "capacity-block", ends_at = "2099-01-01T00:00:00Z", zone = "us-west-2b", shape = "p6-b200.48xlarge", count = 2 }
    h200 = { id = "cr-0fedcba9876543210", zone = "us-west-2b", shape = "p5en.48xlarge", count = 1 }
  }
  transport       = { library = "mooncake", protocol = "efa" }
  ssh_keys        = ["ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIGV4YW1wbGVleGFtcGxlZXhhbXBsZWV4YW1wbGVleA ops"]
  allowed_clients = ["198.51.100.0/24"]
  admin_clients   = ["203.0.113.7/32"]
  image           = { gpu = "ami-0123456789abcdef0", cpu = "ami-0fedcba9876543210" }
}

run "outputs_are_the_modules" {
  command = apply
  assert {
    condition     = jsonencode(keys(output.nodes)) == jsonencode(["t-decode-1", "t-decode-2", "t-prefill-1", "t-router-1"]) && jsonencode(keys(output.inventory)) == jsonencode(["decode", "ingress", "native", "observability", "prefill", "router"])
    error_message = jsonencode(output.nodes)
  }
  assert {
    condition     = length(output.ingress_addresses) == 1 && output.hourly_cost.known > 0
    error_message = jsonencode(output.hourly_cost)
  }
}

run "zone_is_a_region" {
  command = plan
  variables {
    zone = "us-west-2"
  }
  expect_failures = [var.zone]
}

run "nobody_can_call" {
  command = plan
  variables {
    allowed_clients = []
  }
  expect_failures = [var.allowed_clients]
}
